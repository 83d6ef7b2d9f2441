"""/v1/images/generations: not offered, and said so with what it would take.

A picture from words needs three models: encoders of text, a denoiser, and a decoder of latents. The built-in
denoisers are the one in the middle, which `tessera run` runs; nothing here has the other two, and made-up
ones would draw nothing anybody asked for.
"""

from fastapi import APIRouter
from starlette.responses import Response

from tessera.serve.openai_errors import ApiError


def images_router(model: str) -> APIRouter:
    """The route of one served model, which draws nothing; it is not on the OpenAPI page."""
    router = APIRouter(prefix="/v1", include_in_schema=False)

    @router.post("/images/generations")
    async def generations() -> Response:
        """Refuses."""
        message = (
            f"'{model}' draws no pictures. That needs encoders of text and a decoder of latents besides a "
            "denoiser, and no model that can be served here has them; `tessera run` runs denoisers alone."
        )
        raise ApiError(400, message, "model", "unsupported_model")

    return router
