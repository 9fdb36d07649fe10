//! Frames: a length of four bytes, little endian, and as many bytes of postcard.
//!
//! The length is a stranger's word: above the limit it is refused, and below it memory grows only
//! as bytes come in.

use std::fmt;
use std::io::{self, Read};
use std::sync::Arc;

use serde::Serialize;
use serde::de::DeserializeOwned;

/// The most bytes of a frame, without its length.
pub(super) const FRAME_BYTES_MAX: u32 = 64 << 20;

/// A frame as it travels.
pub(super) type Frame = Arc<[u8]>;

const LENGTH_BYTES: usize = size_of::<u32>();

/// Why no frame could be read.
#[derive(Debug)]
pub(super) enum FrameError {
    Io(io::Error),
    TooLong { bytes: u32, bytes_max: u32 },
    Truncated { bytes: usize, wanted: usize },
    Malformed,
}

/// Encodes `value`, whose parts the caller has kept within their limits.
pub(super) fn encode<T: Serialize>(value: &T) -> Frame {
    let bytes = postcard::to_extend(value, vec![0; LENGTH_BYTES])
        .expect("messages consist of types that postcard can encode");
    let length = u32::try_from(bytes.len() - LENGTH_BYTES).expect("blobs and labels are limited");
    let mut bytes = bytes;
    bytes[..LENGTH_BYTES].copy_from_slice(&length.to_le_bytes());
    bytes.into()
}

/// Reads one frame; `None` if the stream ended before it.
pub(super) fn read<T: DeserializeOwned>(
    stream: &mut impl Read,
    bytes_max: u32,
) -> Result<Option<T>, FrameError> {
    let length = take(stream, LENGTH_BYTES)?;
    if length.is_empty() {
        return Ok(None);
    }
    let length = length
        .try_into()
        .map_err(|short: Vec<u8>| FrameError::Truncated { bytes: short.len(), wanted: 4 })?;
    let bytes = u32::from_le_bytes(length);
    if bytes > bytes_max {
        return Err(FrameError::TooLong { bytes, bytes_max });
    }
    let wanted = bytes as usize;
    let body = take(stream, wanted)?;
    if body.len() < wanted {
        return Err(FrameError::Truncated { bytes: body.len(), wanted });
    }
    match postcard::take_from_bytes(&body) {
        Ok((value, [])) => Ok(Some(value)),
        _ => Err(FrameError::Malformed),
    }
}

/// Reads `bytes` bytes, or fewer if the stream ends.
fn take(stream: &mut impl Read, bytes: usize) -> Result<Vec<u8>, FrameError> {
    let mut taken = Vec::new();
    stream.take(bytes as u64).read_to_end(&mut taken).map_err(FrameError::Io)?;
    Ok(taken)
}

impl fmt::Display for FrameError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Io(error) => write!(f, "the connection broke: {error}"),
            Self::TooLong { bytes, bytes_max } => {
                write!(f, "a frame of {bytes} bytes was announced; at most {bytes_max} are allowed")
            }
            Self::Truncated { bytes, wanted } => {
                write!(f, "the connection closed inside a frame, after {bytes} of {wanted} bytes")
            }
            Self::Malformed => f.write_str("a frame holds no message of this protocol"),
        }
    }
}

#[cfg(test)]
mod tests {
    use insta::assert_snapshot;

    use super::super::super::message::{BLOB_BYTES_MAX, Blob, LABEL_BYTES_MAX, Request};
    use super::*;

    fn decode(bytes: &[u8]) -> Result<Option<Request>, FrameError> {
        read(&mut &bytes[..], FRAME_BYTES_MAX)
    }

    #[test]
    fn the_longest_request_fits() {
        let (label, blob) = ("l".repeat(LABEL_BYTES_MAX), Blob(vec![7; BLOB_BYTES_MAX]));
        let frame = encode(&Request::Give { sequence: u64::MAX, label, blob });
        assert!(frame.len() <= LENGTH_BYTES + FRAME_BYTES_MAX as usize);
        let Ok(Some(Request::Give { blob, .. })) = decode(&frame) else { panic!("not a give") };
        assert_eq!((blob.0.len(), blob.0.last()), (BLOB_BYTES_MAX, Some(&7)));
    }

    #[test]
    fn every_cut_is_noticed_and_no_change_of_a_byte_panics() {
        let frame =
            encode(&Request::Give { sequence: 300, label: "a".into(), blob: Blob(vec![1]) });
        assert!(matches!(decode(&[]), Ok(None)));
        for cut in 1..frame.len() {
            let error = decode(&frame[..cut]).unwrap_err();
            assert!(matches!(error, FrameError::Truncated { .. }), "cut at {cut}: {error}");
        }
        for at in 0..frame.len() {
            for value in 0..=u8::MAX {
                let mut changed = frame.to_vec();
                changed[at] = value;
                let _ = decode(&changed);
            }
        }
    }

    #[test]
    fn says_what_is_wrong() {
        let text = |bytes: &[u8]| decode(bytes).unwrap_err().to_string();
        assert_snapshot!(text(&[1, 0]), @"the connection closed inside a frame, after 2 of 4 bytes");
        assert_snapshot!(text(&[9, 0, 0, 0, 1, 2]), @"the connection closed inside a frame, after 2 of 9 bytes");
        assert_snapshot!(text(&[255; 8]), @"a frame of 4294967295 bytes was announced; at most 67108864 are allowed");
        assert_snapshot!(text(&[1, 0, 0, 0, 99]), @"a frame holds no message of this protocol");
        // A goodbye with a byte too many.
        assert_snapshot!(text(&[2, 0, 0, 0, 4, 0]), @"a frame holds no message of this protocol");
    }
}
