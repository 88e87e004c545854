"""A trained model for others: exports, model cards, and the Hub."""
