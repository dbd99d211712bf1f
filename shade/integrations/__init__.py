"""Adapters for the loops that people have: Hugging Face's Trainer and Accelerate, Lightning, Ray Train, torchdata.

Each module imports its framework, and nothing else here does. A class of a framework that saves and resumes keeps its
manners where it has any: what is saved when, what is best, what goes. Decision 0057.
"""
