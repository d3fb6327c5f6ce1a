"""The chat screen: tabs, conversations, and what they need."""
