"""What acts around the models during a run: hooks, optimiser wrappers and their constructors."""
from .resume_guard import ResumeGuardHook

__all__ = ['ResumeGuardHook']
