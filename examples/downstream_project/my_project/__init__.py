"""A detector of one's own on mminline's backbones."""
