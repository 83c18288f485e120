"""What a user would pick instead, at its best sensible settings."""
