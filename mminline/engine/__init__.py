"""What acts around the models during a run: hooks, optimiser wrappers and their constructors."""
from .precision_guard import PrecisionGuardHook
from .resume_guard import ResumeGuardHook

__all__ = ['PrecisionGuardHook', 'ResumeGuardHook']
