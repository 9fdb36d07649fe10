//! Regions as engines see them, and the checks of an op before any part of its slice is accepted.

use crate::device::{DevicePtr, Fault};
use peerlane_hal::Rank;
use peerlane_hal::Role;

const WORD_BYTES: u64 = size_of::<u64>() as u64;

/// Memory of this rank, as its device accesses it.
pub trait EngineRegion {
    /// Returns the address of the first byte.
    fn address(&self) -> DevicePtr;
    /// Returns the length in bytes.
    fn bytes(&self) -> u64;
    /// Returns the role of the memory.
    fn role(&self) -> Role;
    /// Returns the address in this process, if it is host memory that is mapped here.
    fn host_address(&self) -> Option<u64>;

    /// Returns whether it is host memory.
    fn is_on_host(&self) -> bool {
        self.host_address().is_some()
    }
}

/// Imported memory of a peer.
pub trait PeerRegion: EngineRegion {
    /// Returns the owner of the memory.
    fn peer(&self) -> Rank;
}

/// The peers that an engine reaches.
#[derive(Debug)]
pub struct PeerSet {
    rank: Rank,
    /// Whether each rank is connected.
    connected: Vec<bool>,
}

impl PeerSet {
    /// Creates the set of peers of an engine of `rank`.
    pub fn new(rank: Rank, peers: impl IntoIterator<Item = Rank>) -> Self {
        let mut connected = Vec::new();
        for peer in peers {
            if connected.len() <= peer.index() {
                connected.resize(peer.index() + 1, false);
            }
            connected[peer.index()] = true;
        }
        Self { rank, connected }
    }

    /// Returns a number larger than every rank that can be reached.
    pub fn ranks(&self) -> usize {
        self.connected.len()
    }

    /// Returns the rank of the engine.
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// Returns the owner of the memory that an op names.
    ///
    /// # Errors
    /// Returns [`Fault::Argument`] if the engine does not reach that peer.
    pub fn peer_of(&self, region: &impl PeerRegion) -> Result<Rank, Fault> {
        let peer = region.peer();
        if peer == self.rank || self.connected.get(peer.index()) == Some(&true) {
            return Ok(peer);
        }
        Err(Fault::Argument(format!(
            "an op names memory of rank {peer}, which was not connected when this engine of rank \
             {} was created; connect all peers first, then create the engine",
            self.rank
        )))
    }
}

/// Rejects a slice that is too long.
///
/// # Errors
/// Returns [`Fault::Argument`].
pub fn check_slice(ops: usize, slice_ops_max: usize) -> Result<(), Fault> {
    if ops <= slice_ops_max {
        return Ok(());
    }
    Err(Fault::Argument(format!(
        "a slice has {ops} ops, expected at most {slice_ops_max} (slice_ops_max of the engine); \
         split it into several slices"
    )))
}

/// Returns the offset, if `bytes` from it are inside a region of `region_bytes`.
///
/// # Errors
/// Returns [`Fault::Argument`].
pub fn within(what: &str, offset: u64, bytes: u64, region_bytes: u64) -> Result<u64, Fault> {
    match offset.checked_add(bytes) {
        Some(end) if end <= region_bytes => Ok(offset),
        _ => Err(Fault::Argument(format!(
            "{what} out of range: {bytes} bytes from offset {offset}, but the region has \
             {region_bytes} bytes"
        ))),
    }
}

/// Returns the offset of a flag, if the region has it. Only regions of flags are known to be aligned.
///
/// # Errors
/// Returns [`Fault::Argument`].
pub fn flag_within(what: &str, word: u64, region: &impl EngineRegion) -> Result<u64, Fault> {
    if region.role() == Role::Data {
        return Err(Fault::Argument(format!(
            "the {what} is in a region of role Data, expected role Flags; register its memory with \
             Role::Flags"
        )));
    }
    word_within(what, word, region.bytes())
}

fn word_within(what: &str, word: u64, region_bytes: u64) -> Result<u64, Fault> {
    // The saturated offset overflows in the sum and is rejected.
    within(what, word.saturating_mul(WORD_BYTES), WORD_BYTES, region_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_and_words_stay_inside() {
        assert_eq!(within("span", 8, 8, 16).expect("inside"), 8);
        assert_eq!(within("span", 16, 0, 16).expect("nothing at the end"), 16);
        let error = within("put source", 9, 8, 16).expect_err("one too many").to_string();
        assert_eq!(
            error,
            "put source out of range: 8 bytes from offset 9, but the region has 16 bytes"
        );
        within("span", u64::MAX, 1, 16).expect_err("overflow");
        assert_eq!(word_within("flag", 1, 16).expect("the last one"), 8);
        for word in [2, u64::MAX / 8 + 1, u64::MAX] {
            word_within("flag", word, 16).expect_err("outside");
        }
    }
}
