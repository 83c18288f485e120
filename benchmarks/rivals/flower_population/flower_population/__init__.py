"""LeNet on images that belong to many clients, as a Flower app; ``task`` serves pfl's simulation too."""
