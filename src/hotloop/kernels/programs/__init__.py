"""What runs on the device: Triton programs, imported when first launched. What each computes is said by its twin."""
