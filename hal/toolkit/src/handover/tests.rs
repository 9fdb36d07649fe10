use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::MemfdFlags;

use super::*;
use peerlane_hal::Deadline;

/// Memory of so many segments, each a file whose length is its number; one may be broken.
struct Segments {
    count: Option<u32>,
    broken: Option<u32>,
}

impl Handover for Segments {
    fn descriptors(&self) -> Option<u32> {
        self.count
    }

    fn descriptor(&self, index: u32) -> Result<OwnedFd, String> {
        if self.broken == Some(index) {
            return Err(format!("segment {index} is broken"));
        }
        let fd = rustix::fs::memfd_create("segment", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&fd, index.into()).unwrap();
        Ok(fd)
    }
}

const OWNER: Rank = Rank(3);

fn enter_segments(count: Option<u32>, broken: Option<u32>) -> (Entry, Claim) {
    let memory = Arc::new(Segments { count, broken });
    let entry = enter(BackendId::CUDA, OWNER, Role::Data, memory);
    let generation = entry.generation();
    (entry, Claim { backend: BackendId::CUDA, generation, owner: OWNER, role: Role::Data })
}

/// The socket is asked even though both sides are this process.
fn ask_self(claim: &Claim) -> Result<Vec<OwnedFd>, Refusal> {
    ask(ProcessToken::own(), claim, Deadline::after(Duration::from_secs(10)))
}

#[test]
fn every_descriptor_arrives_in_order() {
    let _server = Server::enter().unwrap();
    let most = MESSAGE_FDS_MAX as u32;
    for count in [0, 1, 2, most - 1, most, most + 1, 2 * most + 3] {
        let (_entry, claim) = enter_segments(Some(count), None);
        let fds = ask_self(&claim).unwrap();
        let lengths: Vec<_> = fds.iter().map(|fd| rustix::fs::fstat(fd).unwrap().st_size).collect();
        assert_eq!(lengths, (0..i64::from(count)).collect::<Vec<_>>());
    }
}

#[test]
fn a_segment_that_cannot_be_exported_says_so() {
    let _server = Server::enter().unwrap();
    for broken in [0, MESSAGE_FDS_MAX as u32 + 7] {
        let (_entry, claim) = enter_segments(Some(2 * MESSAGE_FDS_MAX as u32), Some(broken));
        let why = format!("segment {broken} is broken");
        assert_eq!(ask_self(&claim).unwrap_err(), Refusal::Failed { why });
    }
}

#[test]
fn freed_private_and_tampered_are_refused() {
    let _server = Server::enter().unwrap();
    let (entry, claim) = enter_segments(Some(1), None);
    for other in [
        Claim { backend: BackendId::HOST, ..claim },
        Claim { owner: Rank(4), ..claim },
        Claim { role: Role::Flags, ..claim },
        Claim { generation: Generation(u64::MAX), ..claim },
    ] {
        assert_eq!(ask_self(&other).unwrap_err(), Refusal::Freed);
        assert!(find::<Segments>(&other).is_none());
    }
    assert!(find::<Segments>(&claim).is_some());
    drop(entry);
    assert_eq!(ask_self(&claim).unwrap_err(), Refusal::Freed);
    assert!(find::<Segments>(&claim).is_none());
    let (_private, claim) = enter_segments(None, None);
    assert_eq!(ask_self(&claim).unwrap_err(), Refusal::Freed);
    assert!(find::<Segments>(&claim).is_some());
}

#[test]
fn generations_never_come_again() {
    let generations: HashSet<_> =
        (0..100).map(|_| enter_segments(None, None).0.generation()).collect();
    assert_eq!(generations.len(), 100);
}

#[test]
fn a_process_that_is_gone_is_named() {
    let gone = ProcessToken([7; 16]);
    let (_entry, claim) = enter_segments(Some(1), None);
    let refusal = ask(gone, &claim, Deadline::after(Duration::from_secs(1))).unwrap_err();
    let Refusal::Gone { how } = refusal else { panic!("{refusal:?}") };
    assert!(how.contains("peerlane-07070707"), "{how}");
}
