"""The engine screen: panels as pure functions of a Snapshot, and the screen that shows them."""
