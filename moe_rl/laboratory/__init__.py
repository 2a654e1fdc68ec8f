"""Measures how many experts change, where and why: model and tensors in, frozen tables out."""
