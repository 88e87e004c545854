"""What a run would do, and what memory it would take, before anything is loaded."""
