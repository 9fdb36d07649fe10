//! Checks that all ranks prepare an operation with equal options, and exchanges data such as remote keys.
//!
//! A rank that fails still takes part and reports its failure, so all ranks return an error at once and none waits.

use std::time::Instant;

use peerlane_hal::{Deadline, ErrorKind, Rank};
use serde::{Deserialize, Serialize};

use crate::bootstrap::REFUSAL;
use crate::bootstrap::message::BLOB_BYTES_MAX;
use crate::error::Error;
use crate::group::Group;
use crate::group::runtime::Runtime;

#[derive(Debug, Default)]
pub(super) struct Offer {
    fields: Vec<(String, String)>,
    pub(super) blobs: Vec<Vec<u8>>,
}

impl Offer {
    #[must_use]
    pub(super) fn field(mut self, name: &str, value: impl ToString) -> Self {
        self.fields.push((name.to_owned(), value.to_string()));
        self
    }

    #[must_use]
    pub(super) fn blob(mut self, bytes: Vec<u8>) -> Self {
        self.blobs.push(bytes);
        self
    }
}

/// The message of one rank. Fields are decoded only if their bytes differ from those of rank 0.
#[derive(Serialize, Deserialize)]
enum Said<'m> {
    Ready {
        fields: &'m [u8],
        #[serde(borrow)]
        blobs: Vec<&'m [u8]>,
    },
    Failed {
        kind: String,
        text: String,
        peer: Option<u32>,
    },
}

/// Exchanges data between all ranks, so that either every rank gets the data of all or every rank gets an error.
///
/// # Errors
/// This rank's own failure; another rank's, naming it; or
/// [`Mismatch`](ErrorKind::Mismatch), naming the first rank and field that differ from rank 0's.
pub(super) fn agree(
    runtime: &Runtime,
    label: &str,
    mine: Result<Offer, Error>,
    deadline: Deadline,
) -> Result<Vec<Offer>, Error> {
    let life = &*runtime.life;
    let (fields, blobs);
    let (said, own_error) = match mine {
        Ok(offer) => {
            (fields, blobs) = (encode(&offer.fields), offer.blobs);
            let blobs = blobs.iter().map(Vec::as_slice).collect();
            (Said::Ready { fields: &fields, blobs }, None)
        }
        Err(error) => {
            let (kind, text) = (error.kind().to_string(), error.to_string());
            let peer = error.peer().map(|peer| peer.0);
            (Said::Failed { kind, text, peer }, Some(error))
        }
    };
    let mut bytes = encode(&said);
    let mut own_error = own_error;
    if bytes.len() > BLOB_BYTES_MAX {
        let text = format!(
            "{label}: the data of this rank has {} bytes, expected at most {BLOB_BYTES_MAX}",
            bytes.len()
        );
        let kind = ErrorKind::InvalidArgument;
        bytes = encode(&Said::Failed { kind: kind.to_string(), text: text.clone(), peer: None });
        own_error.get_or_insert(Error::new(kind, text));
    }
    // The call of a rank that fails may be another one than that of its peers, who must learn of the failure in any case.
    let sent_label = if own_error.is_some() { REFUSAL } else { label };
    runtime.work.order.refusal.clear();
    // Peers may want to finish what is open before they come here.
    runtime.finish_open(deadline);
    // If the group has ended, that is the cause of this rank's own error too: a rank that has ended frees
    // the memory that others import.
    life.set_timeout(deadline.timeout());
    let _driven = runtime.driver.drive_meanwhile(&runtime.work);
    let begun = Instant::now();
    let _in_exchange = runtime.begin_exchange(label);
    let exchanged =
        life.bootstrap.exchange(sent_label, &bytes, deadline).map_err(|error| life.cause(error))?;
    life.add_exchange(begun.elapsed());
    if let Some(error) = own_error {
        return Err(error);
    }
    let messages = Rank::all(exchanged.len()).zip(&exchanged);
    let messages: Vec<_> =
        messages.map(|(rank, bytes)| (rank, parse(label, rank, bytes))).collect();
    // A rank that blames itself has the cause. Others can have failed because of it.
    let blames_itself = |(rank, message): &&(Rank, Result<_, Error>)| {
        message.as_ref().is_err_and(|error| error.peer() == Some(*rank))
    };
    if let Some((_, Err(error))) = messages.iter().find(blames_itself) {
        return Err(life.identity.name(error.clone()));
    }
    let messages = messages.into_iter().map(|(_, message)| message);
    let messages = messages.collect::<Result<Vec<_>, Error>>();
    let messages = messages.map_err(|error| life.identity.name(error))?;
    for (rank, (fields, _)) in Rank::all(messages.len()).zip(&messages) {
        if *fields != messages[0].0 {
            let error = differing(label, messages[0].0, rank, fields);
            return Err(life.identity.name(error));
        }
    }
    let offer = |(_, blobs): (_, Vec<&[u8]>)| Offer {
        fields: Vec::new(),
        blobs: blobs.into_iter().map(<[u8]>::to_vec).collect(),
    };
    Ok(messages.into_iter().map(offer).collect())
}

pub(super) fn encode<T: Serialize>(value: &T) -> Vec<u8> {
    postcard::to_stdvec(value).expect("plain data always encodes")
}

/// Returns the encoded fields and the blobs of a rank.
fn parse<'m>(label: &str, rank: Rank, bytes: &'m [u8]) -> Result<(&'m [u8], Vec<&'m [u8]>), Error> {
    match postcard::from_bytes(bytes) {
        Ok(Said::Ready { fields, blobs }) => Ok((fields, blobs)),
        Ok(Said::Failed { kind, text, peer }) => {
            let text = format!("{label}: rank {rank} failed ({kind}): {text}");
            Err(Error::new(ErrorKind::Aborted, text).with_peer(peer.map_or(rank, Rank)))
        }
        Err(error) => {
            let text = format!(
                "{label}: cannot decode the message of rank {rank}: {error}; run the same Peerlane \
                 on all ranks"
            );
            Err(Error::new(ErrorKind::Mismatch, text).with_peer(rank).with_source(error))
        }
    }
}

/// Returns the error that names the first field in which a rank differs from rank 0.
fn differing(label: &str, first: &[u8], rank: Rank, other: &[u8]) -> Error {
    let decode = |bytes| postcard::from_bytes::<Vec<(String, String)>>(bytes).unwrap_or_default();
    let (first, other) = (decode(first), decode(other));
    let value = |fields: &[(String, String)], name: &str| {
        fields.iter().find(|(field, _)| field == name).map(|(_, value)| value.clone())
    };
    let both = first.iter().map(|(name, expected)| (name, expected, value(&other, name)));
    let differs = both.filter_map(|(name, expected, found)| Some((name, expected, found?)));
    let differs = differs.into_iter().find(|(_, expected, found)| *expected != found);

    // What one option implies can be a field that only some ranks send, so fields of both come first.
    let text = if let Some((name, expected, found)) = differs {
        format!("{label}: ranks disagree: {name} is {found} on rank {rank}, {expected} on rank 0")
    } else {
        let is_missing_in = |fields: &[(String, String)], (name, _): &&(String, String)| {
            value(fields, name).is_none()
        };
        let of_first = first.iter().find(|field| is_missing_in(&other, field));
        let of_other = other.iter().find(|field| is_missing_in(&first, field));
        match (of_first, of_other) {
            (Some((name, value)), _) => {
                format!(
                    "{label}: ranks disagree: {name} is {value} on rank 0, and not set on rank {rank}"
                )
            }
            (None, Some((name, value))) => {
                format!(
                    "{label}: ranks disagree: {name} is {value} on rank {rank}, and not set on rank 0"
                )
            }
            (None, None) => format!(
                "{label}: rank {rank} and rank 0 sent the same fields in other orders; run the same Peerlane on all ranks"
            ),
        }
    };
    Error::new(ErrorKind::Mismatch, text).with_peer(rank)
}

pub(super) fn blob(offer: &Offer, peer: Rank, index: usize) -> Result<&[u8], Error> {
    offer.blobs.get(index).map(Vec::as_slice).ok_or_else(|| {
        let text = format!(
            "rank {peer} sent {} items, expected more than {index}; run the same Peerlane on all \
             ranks",
            offer.blobs.len()
        );
        Error::new(ErrorKind::Mismatch, text).with_peer(peer)
    })
}

/// Decodes the data that `peer` has offered at an index.
pub(super) fn decode<'o, T: Deserialize<'o>>(
    what: &str,
    offer: &'o Offer,
    peer: Rank,
    index: usize,
) -> Result<T, Error> {
    postcard::from_bytes(blob(offer, peer, index)?).map_err(|error| {
        let text = format!(
            "cannot decode the {what} of rank {peer}: {error}; run the same Peerlane on all ranks"
        );
        Error::new(ErrorKind::Mismatch, text).with_peer(peer)
    })
}

impl Group {
    /// Takes part in a collective call that this rank refuses, and returns the error. Collective.
    ///
    /// It is for callers that check arguments before they call the group, such as an interface for another language. The call takes
    /// the place of the collective call: the other ranks return an error at once that names this rank and has the text of `error`,
    /// whichever call it is. Nothing has changed then, and the group goes on.
    ///
    /// The other ranks' call must be one that exchanges messages, such as the preparation of an operation or a
    /// [window](Self::window). A start of a prepared operation exchanges none; see [`note_refusal`](Self::note_refusal).
    ///
    /// ```
    /// # use peerlane::bootstrap::{Bootstrap, in_process};
    /// # use peerlane::{Group, host};
    /// use peerlane::{Error, ErrorKind};
    ///
    /// # in_process::run(2, |bootstrap| {
    /// # let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
    /// # let mut group = Group::open(bootstrap, fabric)?;
    /// if group.rank().0 == 1 {
    ///     let text = "dtype is 99, expected 0 to 13";
    ///     let _ = group.refuse(Error::new(ErrorKind::InvalidArgument, text));
    /// } else {
    ///     let error = group.all_gather::<f32>(3).prepare().unwrap_err();
    ///     assert_eq!(
    ///         error.to_string(),
    ///         "all-gather 1: rank 1 failed (invalid argument): dtype is 99, expected 0 to 13"
    ///     );
    /// }
    /// group.barrier()?;
    /// # group.close()
    /// # }).unwrap();
    /// ```
    pub fn refuse(&mut self, error: Error) -> Error {
        // The caller learns why its call was refused, even if the others cannot be told: the next call says why.
        let deadline = Deadline::after(self.timeout());
        let _ = agree(&self.runtime, "refusal", Err(error.clone()), deadline);
        self.note_refusal(&error);
        error
    }

    /// Notes that this rank has refused a collective call that exchanges no messages, such as a start.
    ///
    /// The other ranks wait for the start, up to its timeout. They then ask all ranks what they wait for, and the answer of this rank
    /// contains the text of `error`. The next call of this rank clears it.
    pub fn note_refusal(&self, error: &Error) {
        self.runtime.work.order.refusal.note(error);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bootstrap::{Bootstrap, in_process};
    use crate::group::driver::Membership;
    use crate::group::identity::Identity;
    use std::time::Duration;

    fn agreed(offers: impl Fn(Rank) -> Result<Offer, Error> + Sync) -> Vec<Result<usize, Error>> {
        let results = in_process::run(3, |bootstrap| {
            let timeout = Duration::from_secs(5);
            let (deadline, offer) = (Deadline::after(timeout), offers(bootstrap.rank()));
            let first_ranks = Rank::all(3).collect();
            let identity = Identity { label: None, first_ranks, is_first: true };
            let membership = Membership::of_group(&bootstrap);
            let runtime = Runtime::new(Box::new(bootstrap), timeout, identity, membership.driver());
            let agreed = agree(&runtime, "all-gather 1", offer, deadline);
            runtime.life.bootstrap.leave(deadline)?;
            Ok(agreed.map(|offers| offers.len()))
        });
        results.unwrap()
    }

    #[test]
    fn equal_fields_agree() {
        for result in agreed(|_| Ok(Offer::default().field("chunks", 1))) {
            assert_eq!(result.unwrap(), 3);
        }
    }

    #[test]
    fn the_rank_and_the_field_are_named_on_every_rank() {
        for result in agreed(|rank| {
            let bytes = if rank.0 == 2 { 8 } else { 4 };
            Ok(Offer::default().field("dtype", "f32").field("block_bytes", bytes))
        }) {
            let error = result.unwrap_err();
            assert_eq!((error.kind(), error.peer()), (ErrorKind::Mismatch, Some(Rank(2))));
            assert_eq!(
                error.to_string(),
                "all-gather 1: ranks disagree: block_bytes is 8 on rank 2, 4 on rank 0"
            );
        }
    }

    #[test]
    fn a_field_that_only_one_rank_has_is_named() {
        let agreed = |first: bool, other: bool| {
            let text = agreed(|rank| {
                let offer = Offer::default().field("dtype", "f32");
                let has_input = if rank.0 == 1 { other } else { first };
                Ok(if has_input { offer.field("the input", "in window 1") } else { offer })
            });
            text.into_iter().next().unwrap().unwrap_err().to_string()
        };
        assert_eq!(
            agreed(false, true),
            "all-gather 1: ranks disagree: the input is in window 1 on rank 1, and not set on rank 0"
        );
        assert_eq!(
            agreed(true, false),
            "all-gather 1: ranks disagree: the input is in window 1 on rank 0, and not set on rank 1"
        );
    }

    #[test]
    fn the_rank_that_blames_itself_is_named_before_the_ranks_that_blame_others() {
        let results = agreed(|rank| match rank.0 {
            0 => Err(Error::new(ErrorKind::PeerLost, "no answer").with_peer(Rank(1))),
            1 => Err(Error::new(ErrorKind::OutOfMemory, "no descriptor")),
            _ => Ok(Offer::default()),
        });
        let error = results.into_iter().nth(2).unwrap().unwrap_err();
        let text = "all-gather 1: rank 1 failed (out of memory): no descriptor";
        assert_eq!((error.to_string().as_str(), error.peer()), (text, Some(Rank(1))));
    }

    #[test]
    fn a_failure_of_one_rank_is_an_error_on_all() {
        let results = agreed(|rank| match rank.0 {
            1 => Err(Error::new(ErrorKind::OutOfMemory, "no room for the output")),
            _ => Ok(Offer::default()),
        });
        for (index, result) in results.into_iter().enumerate() {
            let text = result.unwrap_err().to_string();
            if index == 1 {
                assert_eq!(text, "no room for the output");
            } else {
                assert_eq!(
                    text,
                    "all-gather 1: rank 1 failed (out of memory): no room for the output"
                );
            }
        }
    }
}
