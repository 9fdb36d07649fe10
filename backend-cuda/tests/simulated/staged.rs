//! Tests staging through host memory between devices without peer access, on the simulated driver.

use peerlane_cuda::{Engine, Error, Fabric, Local, Options, Remote};
use peerlane_hal::{
    At, CopyEngine as _, Error as _, ErrorKind, Fabric as _, Flag, LinkKind, Op, PeerMemory as _,
    Rank, Region as _, RemoteKey as _, Role, Space, Ticket,
};
use peerlane_simulated_driver::Driver;
use peerlane_simulated_driver::{Other, hear, in_own_process, tell};

use crate::support::{Allocation, connected, driver, flag_value, pattern, pointer, soon};

const SHARD_BYTES: u64 = 5001;

/// Restores changed settings of the simulated driver when dropped.
struct ChangedSettings<'a>(&'a Driver);

impl<'a> ChangedSettings<'a> {
    fn apart(driver: &'a Driver) -> Self {
        driver.set("P2P", "off");
        Self(driver)
    }

    fn islands(driver: &'a Driver, devices: &str) -> Self {
        driver.set("P2P_ISLAND", devices);
        Self(driver)
    }
}

impl Drop for ChangedSettings<'_> {
    fn drop(&mut self) {
        self.0.set("P2P", "on");
        self.0.set("P2P_ISLAND", "16");
    }
}

fn ranks(count: usize, strict: bool) -> Result<Vec<Fabric>, Error> {
    let open = |rank: Rank| {
        let options = Options { device: rank.0, strict, ..Options::default() };
        Fabric::open_with(rank, count, options)
    };
    connected(count, soon, open)
}

/// One rank of an all-gather that the tests run by hand.
struct Member {
    fabric: Fabric,
    engine: Engine,
    input: Local,
    output: Local,
    flags: Local,
    /// Imported output and flags of every rank.
    peers: Vec<(Remote, Remote)>,
}

impl Member {
    /// Creates a member for every fabric and imports all regions into each.
    fn create_all(fabrics: Vec<Fabric>) -> Vec<Self> {
        let count = fabrics.len();
        let member = |fabric: Fabric| {
            let engine = fabric.engine(Default::default()).unwrap();
            let allocate = |bytes, role| fabric.memory().allocate(bytes, role).unwrap();
            let input = allocate(SHARD_BYTES, Role::Data);
            let output = allocate(SHARD_BYTES * count as u64, Role::Data);
            let flags = allocate(8 * count as u64, Role::Flags);
            Self { fabric, engine, input, output, flags, peers: Vec::new() }
        };
        let mut members: Vec<Self> = fabrics.into_iter().map(member).collect();
        let keys = |member: &Self| {
            let export = |region| member.fabric.memory().export(region).unwrap();
            (export(&member.output), export(&member.flags))
        };
        let keys: Vec<_> = members.iter().map(keys).collect();
        for member in &mut members {
            for (peer, (output, flags)) in Rank::all(count).zip(&keys) {
                let import = |key| member.fabric.memory().import(peer, key, soon()).unwrap();
                member.peers.push((import(output), import(flags)));
            }
        }
        members
    }

    fn me(&self) -> u64 {
        self.fabric.rank().0.into()
    }

    /// Puts the shard to every rank.
    fn push(&mut self, seed: u8, epoch: u64) {
        let me = self.me();
        // SAFETY: nobody else accesses these bytes of the region now.
        unsafe { self.input.upload(0, &shard(me, seed)) }.unwrap();
        let mut ops = Vec::new();
        for (output, flags) in &self.peers {
            let dst = At { region: output, offset: me * SHARD_BYTES };
            let src = At { region: &self.input, offset: 0 };
            ops.push(Op::Put { dst, src, bytes: SHARD_BYTES });
            ops.push(Op::Signal { flag: Flag { region: flags, word: me }, value: epoch });
        }
        // SAFETY: all regions live as long as the member, and no other op writes to the same bytes.
        unsafe { self.engine.submit(&ops) }.unwrap();
    }

    /// Waits for the shards of all ranks and checks them.
    fn check(&mut self, seed: u8, epoch: u64) {
        let count = self.peers.len() as u64;
        let wait = |word| Op::Wait {
            flag: Flag { region: &self.flags, word },
            value: epoch,
            reset: false,
        };
        let waits: Vec<_> = (0..count).map(wait).collect();
        // SAFETY: as above.
        let ticket = unsafe { self.engine.submit(&waits) }.unwrap();
        finish(&mut self.engine, ticket);
        let mut seen = vec![0; self.output.bytes() as usize];
        // SAFETY: nobody else accesses these bytes of the region now.
        unsafe { self.output.download(0, &mut seen) }.unwrap();
        let wanted = (0..count).map(|rank| shard(rank, seed)).collect::<Vec<_>>().concat();
        assert!(seen == wanted, "the output of rank {} in epoch {epoch}", self.me());
        assert_eq!(flag_value(&self.flags, count - 1), epoch);
    }
}

fn shard(rank: u64, seed: u8) -> Vec<u8> {
    pattern(seed.wrapping_add(rank as u8 * 16), SHARD_BYTES as usize)
}

fn finish(engine: &mut Engine, ticket: Ticket) {
    let deadline = soon();
    while engine.completed().unwrap() < ticket {
        assert!(!deadline.has_passed(), "{ticket:?} is not complete");
        std::thread::yield_now();
    }
}

fn gather(members: &mut [Member]) {
    for epoch in 1..=3 {
        let seed = epoch as u8;
        members.iter_mut().for_each(|member| member.push(seed, epoch));
        members.iter_mut().for_each(|member| member.check(seed, epoch));
    }
}

fn kind(fabric: &Fabric, peer: u32) -> LinkKind {
    fabric.link(Rank(peer)).expect("it is connected").kind
}

#[test]
fn ranks_of_one_process_gather_through_the_host() {
    in_own_process(|| {
        let (driver, _turn) = driver();
        let _settings = ChangedSettings::apart(&driver);
        for count in [2, 3] {
            let before = driver.counter("live_mappings", None);
            let mut members = Member::create_all(ranks(count, false).unwrap());
            let held = driver.counter("host_to_host_copies", None);
            gather(&mut members);
            // A host-to-host copy blocks its caller, forever if it is queued after a blocked wait.
            assert_eq!(driver.counter("host_to_host_copies", None), held);
            let first = &members[0];
            assert_eq!(kind(&first.fabric, 0), LinkKind::Local);
            assert_eq!(kind(&first.fabric, 1), LinkKind::HostStaged);
            // Host and devices use the same address for the memory.
            assert_eq!(first.output.space(), Space::Host);
            assert_eq!(first.flags.flags().map(<[_]>::len), Some(count));
            assert!(first.output.flags().is_none());
            assert_eq!(first.flags.flag_value(count as u64), None);
            drop(members);
            assert_eq!(driver.counter("live_mappings", None), before);
        }
    });
}

#[test]
fn host_memory_is_given_back() {
    in_own_process(|| {
        let (driver, _turn) = driver();
        let _settings = ChangedSettings::apart(&driver);
        let fabrics = ranks(2, false).unwrap();
        let (before, calls) =
            (driver.counter("live_allocations", None), driver.calls("cuMemHostUnregister"));
        let region = fabrics[0].memory().allocate(1 << 20, Role::Data).unwrap();
        let key = fabrics[0].memory().export(&region).unwrap();
        let import = || fabrics[1].memory().import(Rank(0), &key, soon());
        let held = import().unwrap();
        drop(region);
        assert_eq!(import().unwrap_err().kind(), ErrorKind::InvalidKey);
        assert_eq!(driver.counter("live_allocations", None), before + 1);
        drop(held);
        assert_eq!(driver.counter("live_allocations", None), before);
        assert_eq!(driver.calls("cuMemHostUnregister"), calls + 1);
        let error = fabrics[0].memory().allocate(1 << 60, Role::Data).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::OutOfMemory);
        assert!(error.to_string().contains("bytes of host memory"), "{error}");
        driver.fail("cuMemHostRegister_v2", 0, 2);
        let error = fabrics[0].memory().allocate(64, Role::Data).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::OutOfMemory, "{error}");
    });
}

#[test]
fn islands_stage_only_where_they_must() {
    let (driver, _turn) = driver();
    let _settings = ChangedSettings::islands(&driver, "2");
    // Both in one island.
    let mut members = Member::create_all(ranks(2, true).unwrap());
    gather(&mut members);
    assert_eq!(kind(&members[0].fabric, 1), LinkKind::NvLink);
    assert_eq!(members[0].output.space(), Space::Device);
    drop(members);
    // The third rank is alone in the other island.
    let fabrics = ranks(3, false).unwrap();
    assert_eq!(kind(&fabrics[0], 1), LinkKind::NvLink);
    assert_eq!(kind(&fabrics[0], 2), LinkKind::HostStaged);
    let mut members = Member::create_all(fabrics);
    gather(&mut members);
    // Rank 1 keeps its memory on the host because of rank 2, so rank 0 reaches it there too.
    assert_eq!(kind(&members[0].fabric, 1), LinkKind::HostStaged);
    assert_eq!(kind(&members[0].fabric, 0), LinkKind::Local);
}

#[test]
fn strict_refuses_staging() {
    let (driver, _turn) = driver();
    let _settings = ChangedSettings::apart(&driver);
    let error = ranks(2, true).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    let text = error.to_string();
    for words in
        ["rank 0 on GPU-", "rank 1 on GPU-", "no peer access between these devices", "`strict`"]
    {
        assert!(text.contains(words), "{text}, expected {words}");
    }
    // Two ranks of one device need no peer access.
    let strict = |rank| {
        let options = Options { strict: true, ..Options::default() };
        Fabric::open_with(Rank(rank), 2, options).unwrap()
    };
    let (mut first, second) = (strict(0), strict(1));
    first.connect(Rank(1), &second.address(), soon()).unwrap();
    assert_eq!(kind(&first, 1), LinkKind::Local);
}

#[test]
fn device_memory_of_a_peer_without_access_is_refused() {
    let (driver, _turn) = driver();
    let _settings = ChangedSettings::apart(&driver);
    let early = Fabric::open(Rank(1), 2, 1).unwrap();
    let before = early.memory().allocate(64, Role::Data).unwrap();
    let mut fabrics = ranks(2, false).unwrap();
    fabrics[0].connect(Rank(1), &early.address(), soon()).unwrap();
    let allocation = Allocation::new(1, 4096);
    // SAFETY: it outlives the registration, and nothing is done with it.
    let own = unsafe { early.memory().register(pointer(allocation.address), 4096, Role::Data) };
    for region in [before, own.unwrap()] {
        let key = early.memory().export(&region).unwrap();
        let error = fabrics[0].memory().import(Rank(1), &key, soon()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        let text = error.to_string();
        for words in ["rank 0 on GPU-", "rank 1 on GPU-", "allocate the memory with Peerlane"] {
            assert!(text.contains(words), "{text}, expected {words}");
        }
    }
    // A closed fabric is detected, although none of its memory would be imported.
    let address = early.address();
    drop(early);
    let error = fabrics[0].connect(Rank(1), &address, soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PeerLost, "{error}");
}

/// The other process: rank 1, which runs the all-gather with its parent.
#[test]
#[ignore = "started by the other tests of this file"]
fn partner() {
    let (_driver, _turn) = driver();
    let device = std::env::var("PARTNER_DEVICE").unwrap().parse().unwrap();
    let mut fabric = Fabric::open(Rank(1), 2, device).unwrap();
    tell(&fabric.address());
    let address = hear().unwrap();
    fabric.connect(Rank(0), &address, soon()).unwrap();
    fabric.connect(Rank(1), &fabric.address(), soon()).unwrap();
    let mut member = in_two_processes(fabric, &mut || hear().unwrap(), &mut |bytes| tell(bytes));
    assert_eq!(kind(&member.fabric, 0), LinkKind::HostStaged);
    for epoch in 1..=3 {
        member.push(epoch as u8, epoch);
        member.check(epoch as u8, epoch);
        // No rank puts again before both have checked their output.
        tell(b"seen");
        hear().unwrap();
    }
}

/// Creates the member of one rank when the other rank is in another process.
fn in_two_processes(
    fabric: Fabric,
    hear: &mut dyn FnMut() -> Vec<u8>,
    tell: &mut dyn FnMut(&[u8]),
) -> Member {
    let engine = fabric.engine(Default::default()).unwrap();
    let allocate = |bytes, role| fabric.memory().allocate(bytes, role).unwrap();
    let input = allocate(SHARD_BYTES, Role::Data);
    let output = allocate(SHARD_BYTES * 2, Role::Data);
    let flags = allocate(16, Role::Flags);
    let mut peers = Vec::new();
    let own = [&output, &flags].map(|region| fabric.memory().export(region).unwrap());
    own.iter().for_each(|key| tell(&key.encode()));
    let others = [hear(), hear()].map(|key| peerlane_cuda::Key::decode(&key).unwrap());
    for peer in Rank::all(2) {
        let keys = if peer == fabric.rank() { &own } else { &others };
        let import = |key| fabric.memory().import(peer, key, soon()).unwrap();
        peers.push((import(&keys[0]), import(&keys[1])));
    }
    // No rank signals before both have imported.
    tell(b"imported");
    assert_eq!(hear(), b"imported");
    Member { fabric, engine, input, output, flags, peers }
}

fn with_partner(variables: &[(&str, &str)]) {
    let mut other = Other::start("staged::partner", variables);
    let mut fabric = Fabric::open(Rank(0), 2, 0).unwrap();
    let address = other.hear();
    other.tell(&fabric.address());
    fabric.connect(Rank(0), &fabric.address(), soon()).unwrap();
    fabric.connect(Rank(1), &address, soon()).unwrap();
    let other = std::cell::RefCell::new(other);
    let mut member = in_two_processes(fabric, &mut || other.borrow_mut().hear(), &mut |bytes| {
        other.borrow_mut().tell(bytes)
    });
    assert_eq!(kind(&member.fabric, 1), LinkKind::HostStaged);
    for epoch in 1..=3 {
        member.push(epoch as u8, epoch);
        member.check(epoch as u8, epoch);
        other.borrow_mut().tell(b"seen");
        assert_eq!(other.borrow_mut().hear(), b"seen");
    }
    other.into_inner().end();
}

#[test]
fn ranks_of_two_processes_gather_through_the_host() {
    let (driver, _turn) = driver();
    let _settings = ChangedSettings::apart(&driver);
    with_partner(&[("PEERLANE_SIM_P2P", "off"), ("PARTNER_DEVICE", "1")]);
}

#[test]
fn a_device_that_one_side_does_not_see_is_staged_alike() {
    let (driver, _turn) = driver();
    let _settings = ChangedSettings::apart(&driver);
    with_partner(&[
        ("PEERLANE_SIM_P2P", "off"),
        ("CUDA_VISIBLE_DEVICES", "1"),
        ("PARTNER_DEVICE", "0"),
    ]);
}
