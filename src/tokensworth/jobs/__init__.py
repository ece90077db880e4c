"""What a command does from end to end."""
