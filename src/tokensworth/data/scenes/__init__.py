"""Generated rooms with exact depth: deterministic by seed, thousands of frames in minutes, no download."""

from tokensworth.data.scenes.frames import Frame, render_frame, write_frames
from tokensworth.data.scenes.scene import Scene, make_scene

__all__ = ["Frame", "Scene", "make_scene", "render_frame", "write_frames"]
