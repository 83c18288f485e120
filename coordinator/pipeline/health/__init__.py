"""Who is to blame: stuck, wrong, odd or doubted workers, and what follows for them. Pure."""
