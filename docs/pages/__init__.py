"""Pages of the site that are made from the code while it is built, so that nothing can be missing in them."""
