//! Registers memory that another fabric of the process has allocated, and imports it in a second
//! process.

use std::process::Command;
use std::ptr::NonNull;
use std::sync::atomic::Ordering::Acquire;
use std::time::Duration;

use peerlane_hal::{
    At, CopyEngine, Deadline, Fabric, Flag, Op, PeerMemory, Rank, Region, RemoteKey, Role,
};
use peerlane_host as host;
use peerlane_tests::processes::{Child, Parent, hex, unhex};

const OWNER: Rank = Rank(0);
const IMPORTER: Rank = Rank(1);
const DATA: u64 = 5001;
const WORDS: u64 = 4;

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(20))
}

fn pattern() -> Vec<u8> {
    (0..DATA).map(|index| (index % 251) as u8 + 1).collect()
}

/// A part of a region, registered with another fabric.
fn part(fabric: &host::Fabric, whole: &host::Local, head: u64, bytes: u64) -> host::Local {
    assert!(head + bytes <= whole.bytes());
    let base = NonNull::new(whole.base().as_ptr().wrapping_add(head as usize)).unwrap();
    let role = if whole.flags().is_some() { Role::Flags } else { Role::Data };
    // SAFETY: just checked to lie inside the region, which tests keep until the other process has
    // ended; only engines touch the flags.
    unsafe { fabric.memory().register(base, bytes, role) }.unwrap()
}

fn read(region: &host::Local) -> Vec<u8> {
    let bytes = (0..region.bytes() as usize).map(|at| region.base().as_ptr().wrapping_add(at));
    // SAFETY: inside the region, to which nobody writes any more.
    bytes.map(|byte| unsafe { byte.read() }).collect()
}

/// The other process: puts a pattern to the first key, and signals the last flag of the second.
#[test]
#[ignore = "started by the other tests of this program"]
fn importer() {
    let parent = Parent::find().expect("started by a test");
    // The harness has begun a line.
    parent.print_line("");
    let mut fabric = host::Fabric::open(IMPORTER, 2).unwrap();
    fabric.connect(OWNER, &unhex(&parent.read_line().unwrap()), soon()).unwrap();
    let import = || {
        let key = host::Key::decode(&unhex(&parent.read_line().unwrap())).unwrap();
        fabric.memory().import(OWNER, &key, soon())
    };
    let (data, flags) = match (import(), import()) {
        (Ok(data), Ok(flags)) => (data, flags),
        (data, flags) => {
            let errors = [data.err(), flags.err()];
            return parent.print_line(format_args!("refused {errors:?}"));
        }
    };
    let source = fabric.memory().allocate(DATA, Role::Data).unwrap();
    for (at, byte) in pattern().into_iter().enumerate() {
        // SAFETY: inside the region, which nobody else knows yet.
        unsafe { source.base().as_ptr().wrapping_add(at).write(byte) };
    }
    let mut engine = fabric.engine(Default::default()).unwrap();
    let (dst, src) = (At { region: &data, offset: 0 }, At { region: &source, offset: 0 });
    let flag = Flag { region: &flags, word: WORDS - 1 };
    let ops = [Op::Put { dst, src, bytes: DATA }, Op::Signal { flag, value: 9 }];
    // SAFETY: everything lives until the ticket is complete, and nobody else touches it.
    let ticket = unsafe { engine.submit(&ops) }.unwrap();
    let deadline = soon();
    while engine.completed().unwrap() < ticket {
        assert!(!deadline.has_passed());
    }
    parent.print_line("done");
}

/// What the other process says at the end, when it was given these regions of `fabric`.
fn told(fabric: &host::Fabric, data: &host::Local, flags: &host::Local) -> String {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--ignored", "--exact", "importer", "--nocapture", "--test-threads=1"]);
    command.env("PEERLANE_TEST_ROLE", "importer");
    let mut child = Child::spawn("importer", command).unwrap();
    child.send_line(hex(&fabric.address())).unwrap();
    for region in [data, flags] {
        child.send_line(hex(&fabric.memory().export(region).unwrap().encode())).unwrap();
    }
    loop {
        let line = child.read_line(soon()).unwrap();
        if line.starts_with("done") || line.starts_with("refused") {
            return line;
        }
    }
}

#[test]
fn what_one_fabric_allocated_another_can_export() {
    let first = host::Fabric::open(OWNER, 2).unwrap();
    let second = host::Fabric::open(OWNER, 2).unwrap();
    for (head, word) in [(0, 0), (1, 1), (4096, 2), (12_345, 512), (8191, 1000)] {
        let data = first.memory().allocate(head + DATA + 100, Role::Data).unwrap();
        let flags = first.memory().allocate((word + WORDS) * 8, Role::Flags).unwrap();
        let landing = part(&second, &data, head, DATA);
        let words = part(&second, &flags, word * 8, WORDS * 8);
        assert_eq!(told(&second, &landing, &words), "done", "{head} bytes, {word} words before");
        let deadline = soon();
        while flags.flag_value(word + WORDS - 1) != Some(9) {
            assert!(!deadline.has_passed());
        }
        assert!(read(&landing) == pattern(), "{head} bytes before");
        let around = read(&data);
        let after = &around[(head + DATA) as usize..];
        assert!(around[..head as usize].iter().chain(after).all(|byte| *byte == 0));
        let signalled = flags.flags().unwrap().iter().filter(|it| it.load(Acquire) != 0);
        assert_eq!(signalled.count(), 1);
    }
}

#[test]
fn what_the_process_keeps_to_itself_is_refused() {
    let fabric = host::Fabric::open(OWNER, 2).unwrap();
    let heap = vec![0_u64; 100];
    let base = NonNull::from(&heap[0]).cast();
    // SAFETY: nobody gets at it: the import is refused.
    let data = unsafe { fabric.memory().register(base, DATA.min(800), Role::Data) }.unwrap();
    let flags = fabric.memory().allocate(WORDS * 8, Role::Flags).unwrap();
    let line = told(&fabric, &data, &flags);
    assert!(line.starts_with("refused") && line.contains("PrivateMemory"), "{line}");
}
