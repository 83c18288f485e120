"""Links: tensors between the stages of a plan, coded, keyed and sent once."""
