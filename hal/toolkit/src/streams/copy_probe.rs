//! Whether copies copy.
//!
//! A way of copying that keeps compute units free has been seen to copy nothing and say nothing. Where
//! a backend has such a way, bytes are sent and compared: inside the device once for each, and to each
//! peer when it is first reached ([`probe_signal`](super::probe_signal)).

use std::time::Duration;

use super::abilities::{StreamDevice, Trial};
use super::page::{OnDevice, Pinned};
use super::queue::OwnStream;
use crate::device::{Between, DevicePtr, Fault};

const TIMEOUT: Duration = Duration::from_secs(5);
const WORD_BYTES: usize = size_of::<u64>();
/// Words of the trial inside the device.
const WORDS: usize = 509;
/// Where they land in the page on the device.
const LANDING: usize = 1024;

/// Tries copies inside the device, if they have to be tried. The context is current and this thread's
/// captures are relaxed.
pub(super) fn check<D: StreamDevice>(context: &D) -> Result<(), D::Error> {
    if !context.is_doubtful(Between::Own) {
        return Ok(());
    }
    D::found().or_try(Trial::OwnCopies, context.device(), || {
        // A way that is refused does not work either.
        let works = own_copy_works(context).unwrap_or(false);
        context.note_trial(Between::Own, works);
        if works || own_copy_works(context)? {
            return Ok(());
        }
        Err(Fault::Unavailable(format!(
            "copies inside {} copy nothing; is the driver sound?",
            context.label()
        ))
        .into())
    })
}

fn own_copy_works<D: StreamDevice>(context: &D) -> Result<bool, D::Error> {
    let (device, page) = (OnDevice::take(context)?, Pinned::take(context)?);
    let stream = OwnStream::create(context)?;
    let sent = |word: usize| 0x5eed_c0de_0000_0001_u64.wrapping_mul(2 * word as u64 + 1);
    device.clear(context, &stream)?;
    for word in 0..WORDS {
        page.store(word, sent(word));
    }
    let copy = |to, from, bytes, between| {
        // SAFETY: places in the two pages, which are never freed.
        unsafe { context.copy(stream.raw(), to, from, bytes, between) }
    };
    let bytes = WORDS * WORD_BYTES;
    copy(device.address(0), page.address(0), bytes, Between::Host)?;
    copy(device.address(LANDING), device.address(0), bytes, Between::Own)?;
    let all = bytes + WORD_BYTES;
    copy(page.address(LANDING), device.address(LANDING), all, Between::Host)?;
    stream.finish(context, TIMEOUT, "the probe of copies inside the device")?;
    let works = (0..WORDS).all(|word| page.load(LANDING + word) == sent(word))
        && page.load(LANDING + WORDS) == 0;
    device.leave(context);
    page.leave(context);
    Ok(works)
}

/// Tries copies to a peer, whose word `target` nobody else uses meanwhile, if they have to be tried.
/// The word keeps what was sent.
pub(super) fn check_peer<D: StreamDevice>(
    context: &D,
    stream: &OwnStream<D>,
    page: &Pinned,
    target: DevicePtr,
) -> Result<(), D::Error> {
    const SENT: [u64; 2] = [0x5EED_C0B1_E500_0001, 0x5EED_C0B1_E500_0002];
    if !context.is_doubtful(Between::Peers) {
        return Ok(());
    }
    let device = OnDevice::take(context)?;
    let arrives = |sent: u64| -> Result<bool, D::Error> {
        let copy = |to, from, between| {
            // SAFETY: words of the two pages, which are never freed, and the caller's word.
            unsafe { context.copy(stream.raw(), to, from, WORD_BYTES, between) }
        };
        page.store(0, sent);
        copy(device.address(0), page.address(0), Between::Host)?;
        copy(target, device.address(0), Between::Peers)?;
        copy(page.address(1), target, Between::Host)?;
        stream.finish(context, TIMEOUT, "the probe of copies to a peer")?;
        Ok(page.load(1) == sent)
    };
    let works = arrives(SENT[0]).unwrap_or(false);
    context.note_trial(Between::Peers, works);
    let works = works || arrives(SENT[1])?;
    device.leave(context);
    if works {
        return Ok(());
    }
    Err(Fault::Unavailable(format!(
        "copies from {} to a peer copy nothing; is peer access between the devices broken?",
        context.label()
    ))
    .into())
}
