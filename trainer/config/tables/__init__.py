"""The classes behind the tables of a configuration file, a class per table."""
