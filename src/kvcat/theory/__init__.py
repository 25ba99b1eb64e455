"""The paper's theory as running code: definitions, constructions, exact optima and counter-examples, in float64.

Nothing here trains and nothing needs a model from elsewhere.
"""
