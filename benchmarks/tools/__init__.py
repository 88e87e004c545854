"""Make what the pages and the other scripts need: models, pictures and tables."""
