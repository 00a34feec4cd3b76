"""The SQL index: tables, connections, and the mirror that SQL workers read."""
