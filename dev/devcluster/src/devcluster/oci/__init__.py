"""The images: built (images, baseimage), kept and loaded (imagestore), or packed (ociarchive)."""
