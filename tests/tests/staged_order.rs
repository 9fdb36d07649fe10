//! Submits staged and direct ops to one peer: they must take effect in submission order.
//!
//! The rank is its own peer, so that one thread drives both ends.

use std::sync::Arc;
use std::time::Duration;

use peerlane_hal::{
    At, CopyEngine as _, Deadline, DynRegion, Fabric as _, Op, PeerMemory as _, Rank, Region as _,
    Role,
};
use peerlane_host as host;
use peerlane_staged::{Engine, Staged};
use peerlane_tests::GpuDriver;

const BYTES: usize = 3 << 20;

type Device = peerlane_cuda::Fabric;
type Network = host::Fabric;
type Local = peerlane_staged::Local<Device, Network>;
type Remote = peerlane_staged::Remote<Device, Network>;

struct World {
    staged: Staged<Device, Network>,
    engine: Engine<Device, Network>,
    device: Device,
}

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(60))
}

fn at<L>(region: &L) -> At<'_, L> {
    At { region, offset: 0 }
}

impl World {
    fn open() -> Self {
        let driver = GpuDriver::load::<peerlane_cuda::Context>();
        eprintln!("running on: {driver:?}");
        let me = Rank(0);
        let mut device = Device::open(me, 1, 0).unwrap();
        let address = device.address();
        device.connect(me, &address, soon()).unwrap();
        let network = Network::open(me, 1).unwrap();
        let mut staged = Staged::open(&device, network, 1, true, soon()).unwrap();
        let address = staged.address();
        staged.connect(me, &address, soon()).unwrap();
        let engine = staged.engine(Default::default()).unwrap();
        Self { staged, engine, device }
    }

    /// Memory of the device, all of one byte.
    fn on_device(&self, byte: u8) -> Local {
        let region = self.device.memory().allocate(BYTES as u64, Role::Data).unwrap();
        // SAFETY: nobody else accesses these bytes of the region now.
        unsafe { region.upload(0, &vec![byte; BYTES]) }.unwrap();
        // SAFETY: the staged region keeps the device's.
        let local =
            unsafe { self.staged.memory().adopt(&DynRegion::new(Arc::new(region)), Role::Data) };
        let local = local.unwrap();
        assert!(local.device().is_some(), "the network does not reach it");
        local
    }

    /// Memory of the host, all of one byte.
    fn on_host(&self, byte: u8) -> Local {
        let local = self.staged.memory().allocate(BYTES as u64, Role::Data).unwrap();
        // SAFETY: so many bytes were allocated, and no op is under way.
        unsafe { local.base().as_ptr().write_bytes(byte, BYTES) };
        local
    }

    fn import(&self, local: &Local) -> Remote {
        let memory = self.staged.memory();
        memory.import(Rank(0), &memory.export(local).unwrap(), soon()).unwrap()
    }

    fn run(&mut self, ops: &[Op<'_, Local, Remote>]) {
        // SAFETY: the regions outlive this call, which waits for the ticket.
        let ticket = unsafe { self.engine.submit(ops) }.unwrap();
        let deadline = soon();
        while self.engine.completed().unwrap() < ticket {
            assert!(!deadline.has_passed(), "the ops do not complete");
            self.engine.park(Duration::from_micros(50)).unwrap();
        }
    }
}

/// Whether host memory is all of that byte.
fn assert_holds(local: &Local, byte: u8) {
    // SAFETY: so many bytes were allocated, and no op is under way.
    let bytes = unsafe { std::slice::from_raw_parts(local.base().as_ptr(), BYTES) };
    let other = bytes.iter().position(|seen| *seen != byte);
    assert_eq!(other, None, "byte {other:?} is not {byte}");
}

#[test]
fn a_put_past_the_host_comes_after_one_through_it() {
    let mut world = World::open();
    let (first, second) = (world.on_device(1), world.on_host(2));
    let place = world.on_host(0);
    let there = world.import(&place);
    let put = |src| Op::Put { dst: at(&there), src: at(src), bytes: BYTES as u64 };
    world.run(&[put(&first), put(&second)]);
    assert_holds(&place, 2);
}

#[test]
fn a_get_past_the_host_sees_what_was_put_through_it() {
    let mut world = World::open();
    let (source, place, copy) = (world.on_device(1), world.on_host(0), world.on_host(3));
    let there = world.import(&place);
    world.run(&[
        Op::Put { dst: at(&there), src: at(&source), bytes: BYTES as u64 },
        Op::Get { dst: at(&copy), src: at(&there), bytes: BYTES as u64 },
    ]);
    assert_holds(&place, 1);
    assert_holds(&copy, 1);
}

#[test]
fn a_get_past_the_host_comes_after_one_through_it() {
    let mut world = World::open();
    let (first, second, place) = (world.on_device(1), world.on_host(2), world.on_host(0));
    let (one, two) = (world.import(&first), world.import(&second));
    let get = |src| Op::Get { dst: at(&place), src: at(src), bytes: BYTES as u64 };
    world.run(&[get(&one), get(&two)]);
    assert_holds(&place, 2);
}

#[test]
fn a_put_through_the_host_reads_before_a_get_past_it_writes() {
    let mut world = World::open();
    let (source, place, other) = (world.on_host(1), world.on_device(0), world.on_host(2));
    let (there, elsewhere) = (world.import(&place), world.import(&other));
    world.run(&[
        Op::Put { dst: at(&there), src: at(&source), bytes: BYTES as u64 },
        Op::Get { dst: at(&source), src: at(&elsewhere), bytes: BYTES as u64 },
    ]);
    assert_holds(&source, 2);
    let mut bytes = vec![0; BYTES];
    // SAFETY: nobody else accesses these bytes of the region now.
    unsafe { place.device().unwrap().download(0, &mut bytes) }.unwrap();
    let wrong = bytes.iter().position(|byte| *byte != 1);
    assert_eq!(wrong, None, "byte {wrong:?} is not what was put");
}
