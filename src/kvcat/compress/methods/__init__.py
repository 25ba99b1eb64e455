"""Methods that make new slots. Every file of this folder is a method, named as the file."""
