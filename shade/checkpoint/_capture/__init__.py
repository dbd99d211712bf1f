"""Takes the attached objects' state apart into JSON and named tensors, and puts it together again."""
