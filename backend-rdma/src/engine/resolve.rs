//! Checks an op against its regions and computes its addresses.

use peerlane_hal::{Op, Rank, Region as _, Role};

use super::own::OwnWork;
use super::pair::{Announcement, Span, Work};
use crate::error::Error;
use crate::memory::{Local, Remote};

const WORD_BYTES: u64 = size_of::<u64>() as u64;

/// An op with its addresses.
#[derive(Clone, Copy, Debug)]
pub(super) enum Resolved {
    /// A copy of zero bytes.
    Nothing,
    Own(OwnWork),
    Peer(Rank, Work),
}

/// Checks an op and computes its addresses.
pub(super) fn resolve(op: &Op<'_, Local, Remote>) -> Result<Resolved, Error> {
    match *op {
        Op::Put { dst, src, bytes } => {
            within("put destination", dst.offset, bytes, dst.region.key.bytes)?;
            within("put source", src.offset, bytes, src.region.bytes())?;
            let here = (src.region, src.offset);
            copy(here, (dst.region, dst.offset), bytes, Direction::Put)
        }
        Op::Get { dst, src, bytes } => {
            within("get destination", dst.offset, bytes, dst.region.bytes())?;
            within("get source", src.offset, bytes, src.region.key.bytes)?;
            let here = (dst.region, dst.offset);
            copy(here, (src.region, src.offset), bytes, Direction::Get)
        }
        Op::Signal { flag, value } => {
            let key = &flag.region.key;
            if key.role == Role::Data {
                return Err(Error::argument(
                    "the signalled flag lies in a region registered as Data, expected Flags"
                        .to_owned(),
                ));
            }
            // A saturated offset is out of bounds and is refused.
            let at = flag.word.saturating_mul(WORD_BYTES);
            within("signalled flag", at, WORD_BYTES, key.bytes)?;
            Ok(match &flag.region.own {
                Some(own) => {
                    let flag = own.base.as_ptr().wrapping_add(at as usize).cast();
                    Resolved::Own(OwnWork::Store { flag, value })
                }
                None => {
                    let (generation, word) = (key.generation.0, flag.word);
                    let (address, first) = (key.address + at, key.remote_keys[0]);
                    let signal = Announcement { generation, word, value, address, key: first };
                    Resolved::Peer(key.rank, Work::Signal(signal))
                }
            })
        }
        Op::Wait { .. } => Err(Error::argument(
            "a wait was submitted to an engine without queued_wait; poll the flag instead"
                .to_owned(),
        )),
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Direction {
    Put,
    Get,
}

/// Resolves a copy whose ranges were checked.
fn copy(
    (local, at): (&Local, u64),
    (remote, offset): (&Remote, u64),
    bytes: u64,
    direction: Direction,
) -> Result<Resolved, Error> {
    if bytes == 0 {
        return Ok(Resolved::Nothing);
    }
    // The ranges lie inside regions, which fit the address space.
    let here = local.base().as_ptr().wrapping_add(at as usize);
    let of_device = local.registration().is_of_device();
    if let Some(own) = &remote.own {
        if of_device || own.is_of_device() {
            let text = "a copy to oneself is of memory of a device; its own fabric copies it";
            return Err(Error::argument(text.to_owned()));
        }
        let there = own.base.as_ptr().wrapping_add(offset as usize);
        let (dst, src) = if direction == Direction::Put { (there, here) } else { (here, there) };
        return Ok(Resolved::Own(OwnWork::Copy { dst, src, bytes: bytes as usize }));
    }
    let span = Span {
        here: here as u64,
        here_keys: local.registration().local_keys(),
        there: remote.key.address + offset,
        there_keys: remote.key.remote_keys,
        bytes,
        of_device,
    };
    let work = if direction == Direction::Put { Work::Write(span) } else { Work::Read(span) };
    Ok(Resolved::Peer(remote.key.rank, work))
}

/// Checks that a range lies inside its region.
fn within(what: &str, offset: u64, bytes: u64, region_bytes: u64) -> Result<(), Error> {
    match offset.checked_add(bytes) {
        Some(end) if end <= region_bytes => Ok(()),
        _ => Err(Error::argument(format!(
            "{what} spans {bytes} bytes from offset {offset}, the region has {region_bytes}"
        ))),
    }
}
