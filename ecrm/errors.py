"""The errors that a user may see, each with the exit code it ends the program with."""


class EcrmError(Exception):
    """An error whose message is one clear line for the user; ends the program with `exit_code`."""

    exit_code = 1
    told = False  # whether the user has been told already


class UsageError(EcrmError):
    """Something the user typed or supplied is wrong: config, data, rank count, missing file."""

    exit_code = 2


class Unrecoverable(EcrmError):
    """More was lost than the protection in use can bring back; names the ranks and what was lost."""

    exit_code = 3


class ParityMismatch(Unrecoverable):
    """The run came to its end, but the check of parity found stripes whose rows and parity do not belong together."""

    exit_code = 5


class DataError(EcrmError):
    """A file exists but its content is damaged or truncated; `rows`, from and to, says where, if that is known."""

    exit_code = 4
    rows: tuple[int, int] = (0, 0)
