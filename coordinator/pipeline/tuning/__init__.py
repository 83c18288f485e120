"""What training measures, and codecs, rates, figures of memory and speed that follow it. Pure."""
