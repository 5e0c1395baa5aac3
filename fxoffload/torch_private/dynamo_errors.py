"""Private torch APIs of Dynamo: the base of errors that pass it with their own type, needed by torch 2.11 to 2.14."""

from torch._dynamo.exc import ShortenTraceback as ShortenTraceback
