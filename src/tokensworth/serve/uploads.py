"""From a request's body to images, within limits on bytes, count and pixels; what is wrong is said in one line."""

import base64
import binascii
import json
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import UploadFile
from starlette.requests import Request

from tokensworth.data.decode import MAX_PIXELS


@dataclass(frozen=True)
class UploadLimits:
    """What a request may bring.

    Attributes:
        images: how many.
        bytes: of each encoded image.
        pixels: of each decoded one.
    """

    images: int = 64
    bytes: int = 20_000_000
    pixels: int = MAX_PIXELS


class BadRequest(Exception):  # noqa: N818
    """A request that cannot be answered: HTTP status and one line."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Upload:
    """One encoded image and what the client calls it."""

    name: str
    data: bytes


async def _body(request: Request, most: int) -> bytes:
    """The whole body; more than `most` bytes are not read."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > most:
            raise BadRequest(413, f"the request is over {most:,} bytes")
        parts.append(part)
    return b"".join(parts)


def _declared(request: Request, most: int) -> None:
    try:
        declared = int(request.headers.get("content-length", "0"))
    except ValueError:
        raise BadRequest(400, "Content-Length is not a number") from None
    if declared > most:
        raise BadRequest(413, f"the request is over {most:,} bytes")


async def read_uploads(request: Request, limits: UploadLimits) -> list[Upload]:
    """The images of a request: multipart files, JSON with base64, or one bare image as the body.

    Args:
        request: `multipart/form-data` with files under any names; `application/json` with `images`, a list of base64
            strings; anything else is taken for an image.
        limits: on bytes and count.

    Raises:
        BadRequest: 400 malformed, 413 too large, 422 no images.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    whole = limits.images * limits.bytes
    if kind == "multipart/form-data":
        _declared(request, whole + 4096 * limits.images)
        uploads = await _multipart(request, limits)
    elif kind == "application/json":
        _declared(request, whole * 4 // 3 + 4096)
        uploads = _from_json(await _body(request, whole * 4 // 3 + 4096), limits)
    else:
        _declared(request, limits.bytes)
        data = await _body(request, limits.bytes)
        uploads = [Upload("image", data)] if data else []
    if not uploads:
        raise BadRequest(422, 'no images: send files as multipart/form-data, or JSON {"images": [base64, ...]}')
    return uploads


async def _multipart(request: Request, limits: UploadLimits) -> list[Upload]:
    uploads: list[Upload] = []
    try:
        async with request.form(max_files=limits.images, max_fields=16) as form:
            for _, value in form.multi_items():
                if not isinstance(value, UploadFile):
                    continue
                data = await value.read(limits.bytes + 1)
                if len(data) > limits.bytes:
                    raise BadRequest(413, f"{_shown(value.filename)}: over {limits.bytes:,} bytes")
                uploads.append(Upload(_shown(value.filename), data))
    except BadRequest:
        raise
    except Exception as error:  # the parser raises many kinds, Starlette's HTTPException among them
        reason = str(getattr(error, "detail", "") or error or type(error).__name__).splitlines()[0]
        raise BadRequest(400, f"malformed multipart/form-data: {reason[:200]}") from None
    return uploads


def _from_json(body: bytes, limits: UploadLimits) -> list[Upload]:
    try:
        found: Any = json.loads(body)
    except (ValueError, RecursionError):
        raise BadRequest(400, "the body is not JSON") from None
    images = found.get("images") if isinstance(found, dict) else None
    if not isinstance(images, list) or not all(isinstance(image, str) for image in images):
        raise BadRequest(422, 'expected {"images": [base64, ...]}')
    if len(images) > limits.images:
        raise BadRequest(413, f"{len(images)} images; at most {limits.images} in a request")
    uploads = []
    for place, text in enumerate(images):
        try:
            # What a browser's reader puts before the data may stay there.
            data = base64.b64decode(text.rpartition("base64,")[2], validate=True)
        except (binascii.Error, ValueError):
            raise BadRequest(400, f"images[{place}] is not base64") from None
        if len(data) > limits.bytes:
            raise BadRequest(413, f"images[{place}]: over {limits.bytes:,} bytes")
        uploads.append(Upload(f"images[{place}]", data))
    return uploads


def _shown(name: str | None) -> str:
    """A client's file name as it may be shown and logged: printable, short, no path."""
    last = (name or "image").replace("\\", "/").rpartition("/")[2]
    return "".join(c for c in last if c.isprintable())[:100] or "image"
