"""The Blobs and Data services: who may fetch and put what, blobs asked of workers, and what nothing needs any more."""
