import stats


def medians():
    return [stats.median(numbers) for numbers in ([3, 1, 2], [4, 1, 3, 2], [5])]


def median_of_nothing():
    try:
        return stats.median([])
    except ValueError:
        return "a ValueError"
