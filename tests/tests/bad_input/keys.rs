//! Imports malformed and expired remote keys.

use std::process::Command;
use std::ptr::NonNull;

use insta::assert_snapshot;
use peerlane_collectives::bootstrap::environment::Environment;
use peerlane_collectives::bootstrap::tcp::{Hub, TcpBootstrap};
use peerlane_collectives::bootstrap::{Bootstrap, Listener};
use peerlane_collectives::error::Error;
use peerlane_collectives::group::Group;
use peerlane_hal::{
    BackendId, Deadline, Envelope, Fabric, Generation, PeerMemory, Rank, Region, RemoteKey, Role,
};
use peerlane_host as host;
use peerlane_tests::processes::{Child, Parent};

use crate::ranks::{LONG, all_said, fabric, on_ranks, said};

fn deadline() -> Deadline {
    Deadline::after(LONG)
}

/// A fabric of one rank, connected to itself.
fn alone() -> host::Fabric {
    let mut fabric = host::Fabric::open(Rank(0), 1).expect("a fabric");
    let address = fabric.address();
    fabric.connect(Rank(0), &address, deadline()).expect("oneself is there");
    fabric
}

fn text<T>(result: Result<T, impl peerlane_hal::Error>) -> String {
    let error = result.err().expect("it is refused");
    format!("{}: {error}", error.kind())
}

#[test]
fn truncated_foreign_and_of_another_backend() {
    let fabric = alone();
    let local = fabric.memory().allocate(64, Role::Data).expect("memory");
    let key = fabric.memory().export(&local).expect("a key").encode();
    for length in 0..key.len() {
        let refused = text(host::Key::decode(&key[..length]));
        assert!(refused.starts_with("invalid key: remote key is truncated: "), "{refused}");
    }
    assert_snapshot!(text(host::Key::decode(&key[..3])), @"invalid key: remote key is truncated: field `magic` has 3 bytes, expected 4");
    assert_snapshot!(text(host::Key::decode(b"GIF89a, and so on")), @r#"invalid key: not a remote key: it starts with the bytes [47, 49, 46, 38], expected [50, 4c, 52, 4b] ("PLRK")"#);
    let envelope = Envelope { backend: BackendId::CUDA, generation: Generation(1), payload: &[] };
    assert_snapshot!(text(host::Key::decode(&envelope.seal())), @"invalid key: remote key belongs to the backend cuda, expected host; open the same backend on both ranks");
    let longer = [&key[..], &[0]].concat();
    assert_snapshot!(text(host::Key::decode(&longer)), @"invalid key: remote key has 1 bytes after its last field, expected none");
}

#[test]
fn of_freed_memory_also_when_its_address_is_used_again() {
    let fabric = alone();
    let memory = fabric.memory();
    let mut bytes = [0_u8; 64];
    let base = NonNull::from(&mut bytes).cast();
    // SAFETY: the array outlives both registrations, and nothing is imported from them.
    let first = unsafe { memory.register(base, 64, Role::Data) }.expect("own memory");
    let key = memory.export(&first).expect("a key");
    drop(first);
    // SAFETY: as above.
    let second = unsafe { memory.register(base, 64, Role::Data) }.expect("own memory");
    assert_eq!(second.base(), base);
    let refused = text(memory.import(Rank(0), &key, deadline()));
    let refused = refused.replace(&key.generation().0.to_string(), "SOME");
    assert_snapshot!(refused, @"invalid key: remote key of rank 0 is stale: rank 0 has freed the memory (generation SOME)");
}

#[test]
fn of_another_rank_or_of_one_that_is_not_connected() {
    let fabric = alone();
    let other = host::Fabric::open(Rank(1), 2).expect("a fabric");
    let local = other.memory().allocate(64, Role::Data).expect("memory");
    let key = other.memory().export(&local).expect("a key");
    assert_snapshot!(text(fabric.memory().import(Rank(0), &key, deadline())), @"invalid key: remote key belongs to rank 1, expected a key of rank 0");
    assert_snapshot!(text(other.memory().import(Rank(0), &key, deadline())), @"peer lost: rank 0 is not connected: call `connect` before `import`");
}

/// Passes on what it is given, but for the end of what rank 1 says at one label.
struct Cutting<B> {
    inner: B,
    label: &'static str,
    bytes: usize,
}

// SAFETY: it cuts bytes, which the group refuses.
unsafe impl<B: Bootstrap> Bootstrap for Cutting<B> {
    fn rank(&self) -> Rank {
        self.inner.rank()
    }

    fn ranks(&self) -> usize {
        self.inner.ranks()
    }

    fn host(&self) -> &str {
        self.inner.host()
    }

    fn exchange(
        &self,
        label: &str,
        mine: &[u8],
        deadline: Deadline,
    ) -> Result<Vec<Vec<u8>>, Error> {
        let cut = if label == self.label && self.rank() == Rank(1) { self.bytes } else { 0 };
        self.inner.exchange(label, &mine[..mine.len() - cut], deadline)
    }

    fn missing(&self) -> Vec<Rank> {
        self.inner.missing()
    }

    fn broadcast(&self, message: &[u8]) -> Result<(), Error> {
        self.inner.broadcast(message)
    }

    fn relay(&self) -> Option<Rank> {
        self.inner.relay()
    }

    fn shares_process(&self) -> bool {
        self.inner.shares_process()
    }

    fn abort(&self, record: &[u8]) -> Result<(), Error> {
        self.inner.abort(record)
    }

    fn listen(&self, listener: std::sync::Arc<dyn Listener>) {
        self.inner.listen(listener);
    }

    fn leave(&self, deadline: Deadline) -> Result<(), Error> {
        self.inner.leave(deadline)
    }

    fn shrink(&self, excluded: &[Rank], deadline: Deadline) -> Result<Box<dyn Bootstrap>, Error> {
        self.inner.shrink(excluded, deadline)
    }
}

#[test]
fn an_offer_that_is_cut_short_on_its_way() {
    let results = on_ranks(2, |bootstrap| {
        let fabric = fabric(&bootstrap);
        let mut group =
            Group::open(Cutting { inner: bootstrap, label: "all-gather 1", bytes: 9 }, fabric)?;
        group.all_gather::<u8>(4).prepare()
    });
    assert_snapshot!(all_said(results), @"all: mismatch, rank 1: all-gather 1: cannot decode the message of rank 1: Hit the end of buffer, expected more data; run the same Peerlane on all ranks");
    let results = on_ranks(2, |bootstrap| {
        let fabric = fabric(&bootstrap);
        Group::open(Cutting { inner: bootstrap, label: "open", bytes: 1 }, fabric)
    });
    assert_snapshot!(all_said(results), @"all: mismatch, rank 1: open: cannot decode the message of rank 1: Hit the end of buffer, expected more data; run the same Peerlane on all ranks");
}

#[test]
fn private_memory_is_not_for_other_processes() {
    let hub = Hub::bind("127.0.0.1:0", 2).expect("a hub");
    let program = std::env::current_exe().expect("this program");
    let mut other = Command::new(program);
    // The child is this program, asked for one test that is a rank if its parent says so.
    other.args(["keys::plays_a_rank", "--exact", "--nocapture"]);
    other.env("PEERLANE_TEST_ROLE", "private").env("PEERLANE_TEST_HUB", hub.address().to_string());
    let mut other = Child::spawn("private", other).expect("a process");
    let here = gather_in_own_memory(Rank(0), &hub.address().to_string());
    let there = loop {
        let line = other.read_line(deadline()).expect("it says what it met");
        if let Some((_, said)) = line.split_once("said ") {
            break said.to_owned();
        }
    };
    other.finish(deadline()).expect("it ends well");
    assert_snapshot!(format!("rank 0: {}\nrank 1: {there}", said(here)), @r"
    rank 0: invalid argument, rank 1: cannot import the output of rank 1: memory of rank 1 cannot be imported: rank 1 registered its own memory instead of calling `allocate`, so only ranks of its process can import it; let rank 1 allocate this memory with `allocate`, or register a file that holds it with `register_descriptor`
    rank 1: invalid argument, rank 0: cannot import the output of rank 0: memory of rank 0 cannot be imported: rank 0 registered its own memory instead of calling `allocate`, so only ranks of its process can import it; let rank 0 allocate this memory with `allocate`, or register a file that holds it with `register_descriptor`
    ");
}

#[test]
fn plays_a_rank() {
    let Some(parent) = Parent::find() else { return };
    let hub: String = parent.value("HUB").expect("an address");
    parent.print_line(format_args!("said {}", said(gather_in_own_memory(Rank(1), &hub))));
}

fn gather_in_own_memory(rank: Rank, hub: &str) -> Result<(), Error> {
    let bootstrap = TcpBootstrap::join(&Environment::at_hub(hub, rank, 2), deadline())?;
    let mut group = Group::open(bootstrap, host::Fabric::open(rank, 2)?)?;
    let mut output = [0_u8; 8];
    // SAFETY: the array outlives the group, and no peer can import it.
    let buffer = unsafe { group.register(&mut output) }?;
    let refused = group.all_gather::<u8>(4).output(buffer).prepare().map(drop);
    group.close()?;
    refused
}
