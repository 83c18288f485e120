"""A Trainer of transformers whose steps are taken by workers; imports ``client``. The owner's side."""
