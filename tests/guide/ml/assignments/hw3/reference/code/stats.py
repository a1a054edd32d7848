def median(numbers):
    if not numbers:
        raise ValueError("nothing has no median")
    ordered, half = sorted(numbers), len(numbers) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
