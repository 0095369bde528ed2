"""What checkers raise."""


class Violation(BaseException):
    """Something that the design promises does not hold; not an Exception, so that no engine takes it for a failure of its own."""
