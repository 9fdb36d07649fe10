//! Implements the checks of `submit` that all engines share, such as limits and the bounds of
//! regions.
//!
//! An engine checks the whole slice before it accepts any op of it. Then every address that it
//! computes lies in its region.

use peerlane_hal::{Caps, Op, Rank, Reducer, Reduction, Role, Rows};

use crate::device::DevicePtr;
use crate::{Fault, Poison};

const WORD_BYTES: u64 = size_of::<u64>() as u64;

/// The state that every engine keeps, namely its capabilities, its first error, and whether it was
/// released.
///
/// ```
/// use peerlane_hal::Caps;
/// use peerlane_toolkit::{EngineState, Fault};
///
/// let caps = Caps { polled: true, slice_ops_max: 4, ..Caps::new("ring") };
/// let mut state = EngineState::<Fault>::new(caps);
/// assert_eq!(state.check(), Ok(()));
///
/// // Every call after a failed one returns the first error.
/// let lost = Fault::Unavailable("the device does not answer".into());
/// let _ = state.keep::<()>(Err(lost.clone()));
/// assert_eq!(state.check(), Err(lost));
/// ```
#[derive(Debug)]
pub struct EngineState<E> {
    caps: Caps,
    reducer: Option<Reducer>,
    poison: Poison<E>,
    released: bool,
}

impl<E: Clone> EngineState<E> {
    /// Creates the state of an engine with the capabilities `caps`.
    pub fn new(caps: Caps) -> Self {
        Self { caps, reducer: None, poison: Poison::new(), released: false }
    }

    /// Returns the capabilities of the engine.
    pub fn caps(&self) -> &Caps {
        &self.caps
    }

    /// Returns what runs the reductions of the engine, or `None` if it has not prepared any.
    pub fn reducer(&self) -> Option<Reducer> {
        self.reducer
    }

    /// Accepts reductions from now on, if there is something that runs them.
    pub fn set_reducer(&mut self, reducer: Option<Reducer>) {
        self.reducer = reducer;
    }

    /// Fails with the error that poisoned the engine, if there was one.
    ///
    /// # Errors
    /// Returns the first error.
    pub fn check(&self) -> Result<(), E> {
        self.poison.check()
    }

    /// Poisons the engine with the error of `result` if it is the first error, and returns
    /// `result`.
    ///
    /// # Errors
    /// Returns the error of `result`.
    pub fn keep<T>(&mut self, result: Result<T, E>) -> Result<T, E> {
        self.poison.keep(result)
    }

    /// Records that the engine was released, so that it accepts no more slices. Returns whether it
    /// is the first time.
    pub fn release(&mut self) -> bool {
        !std::mem::replace(&mut self.released, true)
    }

    /// Returns whether the engine was released and accepts no more slices.
    pub fn is_released(&self) -> bool {
        self.released
    }
}

impl<E: Clone + From<Fault>> EngineState<E> {
    /// Checks the state of the engine, the length of a slice, and that the ops stay inside their
    /// regions. Room in the queue is checked by
    /// [`TicketCounter::check_room`](crate::TicketCounter::check_room).
    ///
    /// # Errors
    /// Returns the first error of the engine, [`Fault::Released`], or [`Fault::Argument`] for the
    /// first op that is not valid.
    pub fn check_slice<L, R>(&self, ops: &[Op<'_, L, R>]) -> Result<(), E>
    where
        L: RegionBounds,
        R: RegionBounds,
    {
        self.check()?;
        if self.released {
            return Err(Fault::Released.into());
        }

        let slice_ops_max = self.caps.slice_ops_max;
        if ops.len() > slice_ops_max {
            return Err(Fault::Argument(format!(
                "a slice has {} ops, expected at most {slice_ops_max} (slice_ops_max of the engine); \
                 split it into several slices",
                ops.len()
            ))
            .into());
        }

        Ok(ops.iter().try_for_each(|op| self.check_op(op))?)
    }

    /// Checks that the engine has an op, and that the op stays inside its regions.
    fn check_op<L, R>(&self, op: &Op<'_, L, R>) -> Result<(), Fault>
    where
        L: RegionBounds,
        R: RegionBounds,
    {
        check_capabilities(&self.caps, op)?;

        match *op {
            Op::Put { dst, src, bytes } => {
                within("put destination", dst.offset, bytes, dst.region)?;
                within("put source", src.offset, bytes, src.region)
            }
            Op::Get { dst, src, bytes } => {
                within("get destination", dst.offset, bytes, dst.region)?;
                within("get source", src.offset, bytes, src.region)
            }
            Op::PutRows { dst, src, bytes, rows } => {
                let Rows { count, dst_pitch, src_pitch } = rows;
                rows_within("put destination", dst.offset, (bytes, count, dst_pitch), dst.region)?;
                rows_within("put source", src.offset, (bytes, count, src_pitch), src.region)
            }
            Op::GetRows { dst, src, bytes, rows } => {
                let Rows { count, dst_pitch, src_pitch } = rows;
                rows_within("get destination", dst.offset, (bytes, count, dst_pitch), dst.region)?;
                rows_within("get source", src.offset, (bytes, count, src_pitch), src.region)
            }
            Op::Signal { flag, .. } => flag_within("signalled flag", flag.word, flag.region),
            Op::Wait { flag, .. } => flag_within("awaited flag", flag.word, flag.region),
            Op::Reduce { dst, srcs, bytes, .. } => {
                let Some(Reducer { sources_max, .. }) = self.reducer else {
                    return Err(Fault::Argument(
                        "a reduction was submitted to an engine that has prepared none; call prepare_reduce, and \
                         combine the memory yourself if it returns None"
                            .to_owned(),
                    ));
                };
                if !(1..=sources_max).contains(&srcs.len()) {
                    return Err(Fault::Argument(format!(
                        "a reduction has {} sources, expected 1 to {sources_max}",
                        srcs.len()
                    )));
                }

                within("reduction destination", dst.offset, bytes, dst.region)?;
                srcs.iter()
                    .try_for_each(|src| within("reduction source", src.offset, bytes, src.region))
            }
            #[cfg(not(peerlane_workspace))]
            _ => Err(Fault::refused_op(op)),
        }
    }
}

/// Checks that an engine with these capabilities has an op, and that offsets and lengths are
/// aligned as it needs.
///
/// # Errors
/// Returns [`Fault::Argument`] with what to do instead.
pub fn check_capabilities<L, R>(caps: &Caps, op: &Op<'_, L, R>) -> Result<(), Fault> {
    let refuse = |text: String| Err(Fault::Argument(text));

    match *op {
        Op::Get { .. } if !caps.gets => refuse(
            "a get was submitted to an engine that has none (gets is false); let the owner of the bytes put them"
                .to_owned(),
        ),
        Op::PutRows { .. } | Op::GetRows { .. } if !caps.rows => refuse(format!(
            "a {} was submitted to an engine that has none (rows is false); copy each row",
            op.name()
        )),
        Op::GetRows { .. } if !caps.gets => refuse(
            "a get of rows was submitted to an engine without gets; let the owner of the bytes put them"
                .to_owned(),
        ),
        Op::Wait { .. } if !caps.queued_wait => refuse(
            "a wait was submitted to an engine that cannot queue waits (queued_wait is false); \
             poll the flag instead"
                .to_owned(),
        ),
        Op::Put { dst, src, bytes } => {
            check_alignment(caps, op.name(), [dst.offset, src.offset, bytes])
        }
        Op::Get { dst, src, bytes } => {
            check_alignment(caps, op.name(), [dst.offset, src.offset, bytes])
        }
        Op::PutRows { dst, src, bytes, rows } => {
            check_alignment(caps, op.name(), [dst.offset, src.offset, bytes])?;
            check_rows(caps, op.name(), bytes, rows)
        }
        Op::GetRows { dst, src, bytes, rows } => {
            check_alignment(caps, op.name(), [dst.offset, src.offset, bytes])?;
            check_rows(caps, op.name(), bytes, rows)
        }
        Op::Signal { .. } | Op::Wait { .. } | Op::Reduce { .. } => Ok(()),
        #[cfg(not(peerlane_workspace))]
        _ => Err(Fault::refused_op(op)),
    }
}

fn check_rows(caps: &Caps, what: &str, bytes: u64, rows: Rows) -> Result<(), Fault> {
    let Rows { count, dst_pitch, src_pitch } = rows;
    if count < 2 {
        return Ok(());
    }

    check_alignment(caps, what, [dst_pitch, src_pitch, bytes])?;
    match [dst_pitch, src_pitch].into_iter().find(|pitch| *pitch < bytes) {
        None => Ok(()),
        Some(pitch) => Err(Fault::Argument(format!(
            "overlapping {what}: a pitch is {pitch} bytes, expected at least the {bytes} bytes of a row"
        ))),
    }
}

fn check_alignment(caps: &Caps, what: &str, numbers: [u64; 3]) -> Result<(), Fault> {
    let align = caps.put_align_bytes;
    match numbers.into_iter().find(|number| !number.is_multiple_of(align)) {
        None => Ok(()),
        Some(odd) => Err(Fault::Argument(format!(
            "misaligned {what}: an offset or the length is {odd} bytes, expected a multiple of \
             {align} bytes (put_align_bytes)"
        ))),
    }
}

/// Checks that the last row of a strided copy, and so every row, stays inside its region.
fn rows_within(
    what: &str,
    offset: u64,
    (bytes, count, pitch): (u64, u64, u64),
    region: &(impl RegionBounds + ?Sized),
) -> Result<(), Fault> {
    let last = count.saturating_sub(1).checked_mul(pitch).and_then(|row| row.checked_add(offset));
    within(what, last.unwrap_or(u64::MAX), bytes, region)
}

fn within(
    what: &str,
    offset: u64,
    bytes: u64,
    region: &(impl RegionBounds + ?Sized),
) -> Result<(), Fault> {
    let region_bytes = region.bytes();
    match offset.checked_add(bytes) {
        Some(end) if end <= region_bytes => Ok(()),
        _ => Err(Fault::Argument(format!(
            "{what} out of range: {bytes} bytes from offset {offset}, but the region has \
             {region_bytes} bytes"
        ))),
    }
}

/// Checks that a flag is inside a region of flags, because only such regions are known to be
/// aligned.
fn flag_within(what: &str, word: u64, region: &(impl RegionBounds + ?Sized)) -> Result<(), Fault> {
    if region.role() == Role::Data {
        return Err(Fault::Argument(format!(
            "the {what} is in a region of role Data, expected role Flags; register its memory with \
             Role::Flags"
        )));
    }

    // The saturated offset overflows in the sum and is rejected.
    within(what, word.saturating_mul(WORD_BYTES), WORD_BYTES, region)
}

/// Checks that addresses and lengths of a reduction are multiples of the size of an element.
///
/// # Errors
/// Returns [`Fault::Argument`] with the first that is not.
pub fn check_elements(
    mut places: impl Iterator<Item = u64>,
    reduction: Reduction,
) -> Result<(), Fault> {
    let bytes = reduction.dtype().bytes() as u64;
    match places.find(|place| !place.is_multiple_of(bytes)) {
        None => Ok(()),
        Some(place) => Err(Fault::Argument(format!(
            "misaligned reduction: an address or the length is {place}, expected a multiple of {bytes} bytes, the size of \
             {}",
            reduction.dtype()
        ))),
    }
}

/// Reports the length and the role of a region for the checks of ops.
///
/// ```compile_fail,E0200
/// use peerlane_hal::Role;
/// use peerlane_toolkit::RegionBounds;
///
/// struct Memory(Vec<u8>);
///
/// // An engine accesses as many bytes as this says, so the implementation is unsafe.
/// impl RegionBounds for Memory {
///     fn bytes(&self) -> u64 {
///         self.0.len() as u64
///     }
///     fn role(&self) -> Role {
///         Role::Data
///     }
/// }
/// ```
///
/// # Safety
/// The region has at least [`bytes`](Self::bytes) bytes for as long as it lives. If the
/// [role](Self::role) is `Flags`, it begins at a multiple of 8 bytes. Both never change.
pub unsafe trait RegionBounds {
    /// Returns the length of the region in bytes.
    fn bytes(&self) -> u64;
    /// Returns whether the region holds data or flags.
    fn role(&self) -> Role;
}

/// A region with the addresses by which the device of this rank accesses it.
///
/// # Safety
/// All [`bytes`](RegionBounds::bytes) bytes from the [address](Self::address) are those of the
/// region, for engines of the fabric that registered or imported it. The same holds for the
/// [host address](Self::host_address) and accesses by this process. The provided methods are not
/// overridden with others.
pub unsafe trait EngineRegion: RegionBounds {
    /// Returns the address at which the device accesses the region's first byte.
    fn address(&self) -> DevicePtr;
    /// Returns the region's address in this process, or `None` if this process has not mapped it as
    /// host memory.
    fn host_address(&self) -> Option<u64>;

    /// Returns the device address of the byte at `offset`, which the caller has checked.
    fn address_at(&self, offset: u64) -> DevicePtr {
        self.address() + offset
    }

    /// Returns the device address of a flag whose bounds the caller has checked.
    fn flag_address(&self, word: u64) -> DevicePtr {
        self.address() + word * WORD_BYTES
    }

    /// Returns a flag's address in this process, or `None` if this process has not mapped it as
    /// host memory.
    fn host_flag_address(&self, word: u64) -> Option<u64> {
        self.host_address().map(|base| base + word * WORD_BYTES)
    }

    /// Returns whether the region is host memory that this process has mapped.
    fn is_on_host(&self) -> bool {
        self.host_address().is_some()
    }
}

/// A region of a peer that this rank has imported.
///
/// # Safety
/// The memory belongs to the rank that [`peer`](Self::peer) returns, which never changes.
pub unsafe trait PeerRegion: EngineRegion {
    /// Returns the rank that owns the memory.
    fn peer(&self) -> Rank;
}

/// The peers that were connected when an engine was created.
#[derive(Debug)]
pub struct PeerSet {
    rank: Rank,
    connected: Vec<bool>,
}

impl PeerSet {
    /// Creates the set of peers that an engine of rank `rank` reaches.
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

    /// Returns the length of an array with one entry per connected rank, larger than every rank's
    /// number.
    pub fn ranks(&self) -> usize {
        self.connected.len()
    }

    /// Returns the rank that the engine serves.
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// Returns the rank that owns a region, after a check that the engine reaches it.
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

#[cfg(test)]
mod tests {
    use peerlane_hal::{At, Flag};

    use super::*;

    #[derive(Debug)]
    struct Memory(u64, Role);

    // SAFETY: no engine accesses the region.
    unsafe impl RegionBounds for Memory {
        fn bytes(&self) -> u64 {
            self.0
        }

        fn role(&self) -> Role {
            self.1
        }
    }

    const CAPS: Caps = Caps {
        queued_wait: true,
        polled: true,
        slice_ops_max: 2,
        put_align_bytes: 4,
        ..Caps::new("test")
    };

    fn text(state: &EngineState<Fault>, op: Op<'_, Memory, Memory>) -> String {
        state.check_slice(&[op]).expect_err("an invalid op").to_string()
    }

    #[test]
    fn spans_and_flags_stay_inside_their_regions() {
        let state = EngineState::<Fault>::new(CAPS);
        let (data, flags) = (Memory(16, Role::Data), Memory(16, Role::Flags));
        let put = |to, from, bytes| Op::Put {
            dst: At { region: &data, offset: to },
            src: At { region: &data, offset: from },
            bytes,
        };
        let signal = |word| Op::Signal { flag: Flag { region: &flags, word }, value: 1 };
        let wait = |region, word| Op::Wait { flag: Flag { region, word }, value: 1, reset: false };
        state.check_slice(&[put(8, 0, 8), put(16, 0, 0)]).expect("inside, and nothing at the end");
        state.check_slice(&[signal(1), wait(&flags, 0)]).expect("the last word and the first");
        assert_eq!(
            text(&state, put(0, 12, 8)),
            "put source out of range: 8 bytes from offset 12, but the region has 16 bytes"
        );
        assert_eq!(
            text(&state, put(0, 0, 6)),
            "misaligned put: an offset or the length is 6 bytes, expected a multiple of 4 bytes \
             (put_align_bytes)"
        );
        text(&state, put(u64::MAX - 3, 0, 4));
        for word in [2, u64::MAX / 8 + 1, u64::MAX] {
            text(&state, signal(word));
        }
        assert_eq!(
            text(&state, wait(&data, 0)),
            "the awaited flag is in a region of role Data, expected role Flags; register its memory \
             with Role::Flags"
        );
        let polled = EngineState::<Fault>::new(Caps { queued_wait: false, ..CAPS });
        assert!(text(&polled, wait(&flags, 0)).contains("queued_wait is false"));
    }

    #[test]
    fn long_slices_and_released_engines_are_refused() {
        let mut state = EngineState::<Fault>::new(CAPS);
        let flags = Memory(8, Role::Flags);
        let op: Op<'_, _, Memory> =
            Op::Wait { flag: Flag { region: &flags, word: 0 }, value: 1, reset: false };
        let error = state.check_slice(&[op; 3]).expect_err("three of two").to_string();
        assert_eq!(
            error,
            "a slice has 3 ops, expected at most 2 (slice_ops_max of the engine); split it into several \
             slices"
        );
        assert!(state.release());
        assert!(!state.release());
        assert_eq!(state.check_slice(&[op]), Err(Fault::Released));
    }
}
