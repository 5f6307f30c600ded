"""Context parallelism: every sequence is divided over the ranks of a group, and attention spans them."""
