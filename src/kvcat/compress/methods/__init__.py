"""Methods that make slots of their own. Every file of this folder is a method, named as the
file.
"""
