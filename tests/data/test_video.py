"""Compare the frames, sizes and patches of videos with qwen-vl-utils and transformers."""

import io
import sys
import tempfile
import wave
from dataclasses import replace
from pathlib import Path

import numpy as np
import PIL.Image
import pytest

from minivlmrl.data import video as video_module
from minivlmrl.data.image import ImageProcessor
from minivlmrl.data.image_settings import RESIZE
from minivlmrl.data.video import Video, frame_size, load_video, outline_video
from minivlmrl.extras import video_files
from tests.helpers import tiny
from tests.record.record_vision import attempt, digest, frame_size_cases, noise, recorded, sampling_cases, video_cases

PROCESSOR = ImageProcessor()


def moving(count, height=24, width=32):
    """Return frames with the values (7 row + 13 column + 29 channel + 17 frame) mod 256."""
    t, y, x, c = np.ogrid[:count, :height, :width, :3]
    return ((7 * y + 13 * x + 29 * c + 17 * t) % 256).astype(np.uint8)


def pictures(frames):
    return [PIL.Image.fromarray(frame) for frame in frames]


def shown(frames, fps=2.0, **options):
    return Video(frames, fps).patches(PROCESSOR, **options)


FRAMES = pictures(moving(26))
REFUSED = [  # (call, error message)
    (lambda: video_files.sample_indices(100, 30, nframes=1), "cannot sample 0 frames of a video of 100"),
    (lambda: video_files.sample_indices(100, 30, fps=1, nframes=4), "nframes cannot be combined with fps"),
    (lambda: video_files.sample_indices(100, 30, video_start=1.0, video_end=1.0),
     "between video_start 1.0 and video_end 1.0; .*3.33333 s"),
    (lambda: video_files.sample_indices(0, 30), "no frame can be sampled"),
    (lambda: shown(FRAMES, pixels=2), "unknown key pixels; did you mean min_pixels or max_pixels?"),
    (lambda: shown(FRAMES, max_pixels=50_000), "max_pixels is 50000, but it must be at least min_pixels, which is 100"),
    (lambda: shown(FRAMES, resized_width=100), "resized_height and resized_width must be given together"),
    (lambda: shown([]), "the video must have frames with at least 1 x 1 pixels"),
    (lambda: shown([noise("RGB", (4, 5)), noise("RGB", (5, 4))]), "frame 1 has 5 x 4 pixels and frame 0 has 4 x 5"),
    (lambda: load_video(["a.png"] * 4, video_end=2), "video_end selects frames of a video file, but"),
    (lambda: sys.modules.update(av=None) or load_video("a.mp4"), r"^a\.mp4: .* requires PyAV; run pip install -e '\."),
]  # fmt: skip


@pytest.mark.parametrize(("call", "sentence"), REFUSED, ids=[sentence[:30] for _, sentence in REFUSED])
def test_what_is_refused(monkeypatch, call, sentence):
    monkeypatch.setitem(sys.modules, "av", sys.modules.get("av"))  # the test restores this module at its end
    with pytest.raises(ValueError, match=sentence):
        call()


def test_sampling_equals_qwen_vl_utils(fused_linspace):
    cases = recorded("qwen_vl_utils_0.0.14")["sampling"]
    assert len(cases) == 2000
    for (total, video_fps, options), expected in zip(sampling_cases(), cases, strict=True):
        made = attempt(video_files.sample_indices, total, video_fps, **options)
        found = made and [len(made[0]), digest(made[0]), made[1]]
        assert found == expected, (total, video_fps, options)


def test_frame_sizes_equal_qwen_vl_utils_except_where_it_returns_0():
    cases, zeros = recorded("qwen_vl_utils_0.0.14")["frame_sizes"], 0
    assert len(cases) == 2000
    for (nframes, height, width, options), expected in zip(frame_size_cases(), cases, strict=True):
        made = attempt(frame_size, PROCESSOR, nframes, height, width, **options)
        if expected and 0 in expected:
            zeros += 1
            assert list(made) == [max(28, side) for side in expected]
        else:
            assert made == (expected and tuple(expected)), (nframes, height, width, options)
    assert zeros < 10


def test_patches_equal_transformers_video_processor_bit_for_bit():
    cases = recorded("torchvision_0.28.0")["videos"]
    assert len(cases) == 24
    for (frames, options, bounds), (grid, expected) in zip(video_cases(), cases, strict=True):
        processor = ImageProcessor(**options, min_pixels=196, resize=RESIZE["torch"])
        video = Video(pictures(frames), 4.0)
        pixel_values, image_grid_thw, seconds = video.patches(processor, **bounds, total_pixels=10**9)
        assert list(image_grid_thw) == grid and seconds == 0.5
        assert digest(pixel_values) == expected, (frames.shape, options, bounds)


def test_a_patch_has_the_mean_time_of_its_frames():
    """A temporal patch has two frames, so the last of three frames is a patch of its own."""
    processor = replace(PROCESSOR, videos="a family that writes times")
    size = {"resized_height": 28, "resized_width": 28}
    assert Video(pictures(moving(3)), 2.0).patches(processor, **size)[2] == [0.25, 1.0]


@pytest.mark.parametrize(("given", "number"), [
    ({}, 4), ({"video_end": 2}, 2), ({"fps": 2}, 8), ({"nframes": 6}, 6), ({"max_frames": 8}, 8),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("load", [load_video, outline_video])
def test_a_row_s_sampling_replaces_the_folder_s(tmp_path, load, given, number):
    """The model folder asks for one frame per second, and the video takes four seconds."""
    (tmp_path / "video").write_bytes(encoded(moving(16), *LOSSLESS[0], rate=4))
    assert len(load("video", tmp_path, defaults={"fps": 1, "min_frames": 2}, **given).frames) == number


def encoded(frames, *kind, rate=30, **options):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "video")
        tiny.write_video(path, frames, rate, *(kind or LOSSLESS[0]), **options)
        return path.read_bytes()


LOSSLESS = [
    ("matroska", "ffv1", "bgr0"), ("avi", "rawvideo", "bgr24"), ("mov", "png", "rgb24"), ("mp4", "libx264rgb", "rgb24"),
]  # fmt: skip


@pytest.mark.parametrize("kind", LOSSLESS, ids=" ".join)
def test_lossless_files_give_the_original_frames(kind):
    frames = moving(50)
    content = encoded(frames, *kind, rate=15)
    for options, indices, fps in (
        ({}, [0, 10, 20, 29, 39, 49], 6 / 50 * 15),
        ({"video_start": 0.51, "video_end": 1.49, "fps": 8}, [8, 10, 12, 14, 16, 18, 20, 22], 8 / 15 * 15),
        ({"nframes": 50}, list(range(50)), 15),
    ):
        video = load_video(content, **options)
        assert np.array_equal(video.frames, frames[indices]) and video.fps == fps


def test_every_kind_of_source_gives_the_same_video(tmp_path):
    """A path is opened as a file, even if FFmpeg would treat the name as a protocol."""
    frames, path = moving(4), tmp_path / "concat:a|b.mkv"
    path.write_bytes(encoded(frames))
    for source in (path.name, path, f"file://{path}", path.read_bytes()):
        assert np.array_equal(load_video(source, tmp_path).frames, frames)


def test_a_rotated_video_is_shown_upright():
    """Phones store upright videos as landscape frames with a rotation in degrees counterclockwise."""
    frames = moving(4)
    for rotation, turns in ((90, 1), (180, 2), (-90, 3)):
        video = load_video(encoded(frames, *LOSSLESS[-1], rotation=rotation))
        assert np.array_equal(video.frames, np.rot90(frames, turns, axes=(1, 2)))
    with pytest.raises(ValueError, match=r"rotation is (29|30) degrees"):
        load_video(encoded(frames, *LOSSLESS[-1], rotation=30))


def test_a_playlist_opens_no_other_file(tmp_path):
    (tmp_path / "a.ts").write_bytes(encoded(moving(30), "mpegts", "mpeg2video", "yuv420p"))
    assert len(load_video(tmp_path / "a.ts").frames) == 4
    playlists = {
        "a.m3u8": f"#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:1.0,\n{tmp_path}/a.ts\n#EXT-X-ENDLIST\n",
        "a.txt": f"ffconcat version 1.0\nfile '{tmp_path}/a.ts'\n",
    }
    for name, content in playlists.items():
        (tmp_path / name).write_text(content)
        with pytest.raises(ValueError, match=rf"{name}: the file cannot be read as a video"):
            load_video(tmp_path / name)


def test_files_without_frames_are_reported(tmp_path, av):
    with wave.open(str(tmp_path / "a.wav"), "wb") as file:
        file.setparams((1, 2, 8000, 0, "NONE", ""))
        file.writeframes(bytes(16_000))
    with pytest.raises(ValueError, match=r"a\.wav: the file has no video stream"):
        load_video(tmp_path / "a.wav")
    for content in (b"", b"hello", b"\x1aE\xdf\xa3", b"\0\0\0\x20ftypisom"):
        (tmp_path / "notes.mp4").write_bytes(content)
        with pytest.raises(ValueError, match=r"notes\.mp4: the file cannot be read as a video"):
            load_video(tmp_path / "notes.mp4")


def test_a_video_that_would_fill_the_memory_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(video_module, "MAX_VIDEO_PIXELS", 8 * 24 * 32 - 1)
    content = encoded(moving(20))
    assert len(load_video(content, nframes=6).frames) == 6
    PIL.Image.new("RGB", (32, 24)).save(tmp_path / "a.png")
    for source, options in ((content, {"nframes": 8}), ([tmp_path / "a.png"] * 8, {})):
        with pytest.raises(ValueError, match=r"8 frames of 32 x 24 pixels have .* than the limit of 6143; use"):
            load_video(source, **options)


def test_frames_that_claim_too_many_pixels_are_refused_before_they_are_decoded(monkeypatch):
    content = encoded(moving(4))
    monkeypatch.setattr(video_module, "MAX_IMAGE_PIXELS", 24 * 32 - 1)
    with pytest.raises(ValueError, match="frames have 32 x 24 pixels, which is more than the limit of 767"):
        load_video(content)
    # the header of a file may claim a small size for large frames
    monkeypatch.setattr(video_files, "check_size", lambda *_: None)
    monkeypatch.setattr(video_files, "MAX_IMAGE_PIXELS", 24 * 32 - 1)
    with pytest.raises(ValueError, match="the file cannot be read as a video"):
        load_video(content)


def test_frames_that_cannot_be_shown_are_not_counted(av):
    """A stream that begins in the middle shows no frames before its first key frame."""
    whole, headless = encoded(moving(40), "mpegts", "mpeg2video", "yuv420p"), io.BytesIO()
    with av.open(io.BytesIO(whole)) as source, av.open(headless, "w", format="mpegts") as target:
        copy = target.add_stream_from_template(source.streams.video[0])
        for packet in list(source.demux(video=0))[1:]:
            if packet.size:
                packet.stream = copy
                target.mux(packet)
    headless = headless.getvalue()
    with av.open(io.BytesIO(headless)) as file:
        assert sum(packet.size > 0 for packet in file.demux(video=0)) == 39
    with av.open(io.BytesIO(headless)) as file:
        shown = np.stack([frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)])
    assert len(shown) == 28
    video = load_video(headless, nframes=4)
    assert np.array_equal(video.frames, shown[[0, 9, 18, 27]])
    assert video.fps == 4 / 28 * 30
