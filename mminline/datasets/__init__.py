from .shapes import CATEGORY_IDS, CLASSES, SEG_CLASSES, SEG_PALETTE, draw_scene, make_shapes

__all__ = ['CATEGORY_IDS', 'CLASSES', 'SEG_CLASSES', 'SEG_PALETTE', 'draw_scene', 'make_shapes']
