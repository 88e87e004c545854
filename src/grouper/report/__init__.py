"""Pictures and texts made from a finished or running run folder."""
