//! What the engine asks of a driver beside its calls, and what differs from vendor to vendor.

use std::collections::HashMap;
use std::sync::Mutex;

use crate::device::{CopyCalls, GraphCalls, MemoryCalls, WordCalls};

/// A device whose streams an engine is made of.
pub trait StreamDevice: WordCalls + CopyCalls + GraphCalls + MemoryCalls {
    /// What it can do, and which of several ways is best there. The context is current.
    ///
    /// # Errors
    /// The driver's refusal to answer.
    fn abilities(&self) -> Result<Abilities, Self::Error>;

    /// Where the process keeps what trials have shown. One for the backend; a generic type has no
    /// statics.
    fn found() -> &'static Found<Self::Error>;
}

/// What a device can do with streams, and which of several ways is best there. The backend has
/// measured it, or tried it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Abilities {
    /// Copies that it does at once; more at once collapse.
    pub copy_engines: u32,
    /// Streams that copies to peers are spread over, at most.
    pub peer_streams_max: usize,
    /// Copies to peers up to this size are done sooner on one stream, if they go there in one call.
    pub one_stream_bytes_max: u64,
    /// Streams beside the main one in a graph, at most: with more, graphs have run their branches one
    /// after the other.
    pub captured_sides_max: usize,
    /// The largest copy in one piece.
    pub piece_bytes_max: u64,
    /// The largest own copy that comes back over the link by itself.
    pub own_link_bytes_max: Option<u64>,
    /// The same in a graph.
    pub own_link_captured_bytes_max: Option<u64>,
}

/// What is tried once for each device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Trial {
    /// Replays do what was recorded.
    Captures,
    /// Streams wait for words.
    Words,
    /// Memory operations of one call run in order.
    Batches,
    /// Copies inside the device.
    OwnCopies,
}

/// What trials have shown, by device.
#[derive(Debug)]
pub struct Found<E>(Mutex<Option<Known<E>>>);

type Known<E> = HashMap<(Trial, i32), Result<(), E>>;

impl<E> Found<E> {
    /// Nothing is known.
    pub const fn new() -> Self {
        Self(Mutex::new(None))
    }
}

impl<E> Default for Found<E> {
    fn default() -> Self {
        Self::new()
    }
}

impl<E: Clone> Found<E> {
    /// What is known of a device, or what `trial` shows now.
    pub(super) fn or_try(
        &self,
        what: Trial,
        device: i32,
        trial: impl FnOnce() -> Result<(), E>,
    ) -> Result<(), E> {
        let mut found = self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        found.get_or_insert_default().entry((what, device)).or_insert_with(trial).clone()
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in super::super) const ABILITIES: Abilities = Abilities {
        copy_engines: 3,
        peer_streams_max: 2,
        one_stream_bytes_max: 512 << 10,
        captured_sides_max: 1,
        piece_bytes_max: u64::MAX,
        own_link_bytes_max: Some(256 << 10),
        own_link_captured_bytes_max: Some(512 << 10),
    };

    #[test]
    fn a_trial_is_made_once_for_each_device() {
        static FOUND: Found<&str> = Found::new();
        assert_eq!(FOUND.or_try(Trial::Captures, 1, || Err("no")), Err("no"));
        assert_eq!(FOUND.or_try(Trial::Captures, 2, || Ok(())), Ok(()));
        assert_eq!(FOUND.or_try(Trial::Batches, 1, || Ok(())), Ok(()));
        assert_eq!(FOUND.or_try(Trial::Captures, 1, || panic!("it is known")), Err("no"));
    }
}
