"""Files and folders of one user: private, locked, versioned, bounded, frozen."""
