//! Groups: opening, splitting, barriers and ends.

use std::ffi::{CStr, c_char, c_int};
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Mutex;
use std::time::Duration;

use peerlane::bootstrap::Secret;
use peerlane::bootstrap::environment::Environment;
use peerlane::bootstrap::tcp::{HubOptions, TcpBootstrap};
use peerlane::group::GroupEnd;
use peerlane::{Backend, Deadline, Group, OpenOptions, Rank, Window};
use peerlane_bindings::stats_json;

use crate::handle::{Table, clear, lock};
use crate::status::{Failure, Status, call};
use crate::window::drop_windows;
use crate::{HEADER_VERSION, descriptor_into, milliseconds, text_into};

/// The longest wait for the start of all ranks if `start_timeout_ms` is 0.
const START_TIMEOUT: Duration = Duration::from_secs(120);

/// A group of ranks.
#[derive(Debug)]
pub struct GroupHandle(());

/// The process through which ranks find each other.
#[derive(Debug)]
pub struct HubHandle(());

/// How a group is opened. Begin with `PEERLANE_GROUP_OPTIONS_INIT`, and set what differs.
#[repr(C)]
#[derive(Debug)]
pub struct GroupOptions {
    /// `PEERLANE_HEADER_VERSION`.
    pub header_version: u32,
    /// The name of a backend, such as `"host"` or `"cuda"`; NULL selects the best one.
    pub backend: *const c_char,
    /// The number of the GPU of this rank, or -1 to select one.
    pub device: i32,
    /// The longest wait for a peer in milliseconds, or 0 for 30 s.
    pub timeout_ms: u64,
    /// The longest wait for the start of all ranks in milliseconds, or 0 for 120 s.
    pub start_timeout_ms: u64,
    /// Whether fallbacks, such as copies through host memory, are errors.
    pub strict: bool,
    /// Whether operations run beside kernels of the program, and so take few compute units, unless
    /// their own options say otherwise. All ranks set the same.
    pub beside_compute: bool,
    /// The address of a hub, such as `"10.0.0.1:29501"`. NULL takes rank, size and address from the
    /// launcher's environment; `rank` and `secret` then have no effect.
    pub hub: *const c_char,
    /// The rank of this process, from 0.
    pub rank: u32,
    /// The number of ranks. Without a hub it is the expected number, and another one in the
    /// environment is an error; 0 expects none.
    pub ranks: u32,
    /// The secret of the job, of at least 16 bytes; NULL if the hub is on this host.
    pub secret: *const c_char,
    /// The name of the group in the errors of this rank, or NULL for none.
    pub label: *const c_char,
    /// The kind of engines that operations use, such as `"streams"`, unless their own options name
    /// another one; NULL selects the fastest one for each. All ranks set the same.
    pub engine: *const c_char,
}

pub(crate) struct GroupObject {
    /// `None` after the group was closed.
    group: Mutex<Option<Group>>,
    end: GroupEnd,
    rank: u32,
    ranks: u32,
    selection: String,
    /// The windows whose handles were destroyed. Peers may write to their memory until the group is
    /// closed.
    windows: Mutex<Vec<Window<u8>>>,
}

pub(crate) static GROUPS: Table<GroupObject> = Table::new("group", 1);
static HUBS: Table<peerlane::bootstrap::tcp::Hub> = Table::new("hub", 2);

impl GroupObject {
    /// Locks the group, so that calls of several threads take turns.
    pub(crate) fn with<R>(
        &self,
        body: impl FnOnce(&mut Group) -> Result<R, Failure>,
    ) -> Result<R, Failure> {
        let mut group = lock(&self.group);
        let group = group.as_mut().ok_or_else(|| Failure::argument("the group was closed"))?;
        body(group)
    }

    /// Makes a collective call that exchanges messages, after its arguments were checked. If they
    /// are refused, so that this rank does not make the call, the other ranks learn of it.
    pub(crate) fn collective<A, R>(
        &self,
        arguments: impl FnOnce(&Group) -> Result<A, Failure>,
        call: impl FnOnce(&mut Group, A) -> Result<R, Failure>,
    ) -> Result<R, Failure> {
        self.with(|group| match arguments(group) {
            Ok(arguments) => call(group, arguments),
            Err(refused) => Err(group.refuse(refused.into()).into()),
        })
    }

    /// Keeps a window until the group is closed or destroyed.
    pub(crate) fn keep(&self, window: Window<u8>) {
        lock(&self.windows).push(window);
    }
}

/// Stores a group, and writes its handle to `to`.
///
/// # Safety
/// `to` is valid for writes.
unsafe fn give_group(group: Group, to: *mut *mut GroupHandle) -> Result<(), Failure> {
    let object = GroupObject {
        end: group.end()?,
        rank: group.rank().0,
        ranks: u32::try_from(group.ranks()).unwrap_or(u32::MAX),
        selection: group.selection().to_string(),
        group: Mutex::new(Some(group)),
        windows: Mutex::default(),
    };
    // SAFETY: the contract of this function says that `to` is valid for writes.
    unsafe { GROUPS.store_into(object, to) }
}

/// Returns the text of a C string; nothing for NULL.
///
/// # Safety
/// `text` is NULL or a string that ends in zero, and stays unchanged for `'t`.
pub(crate) unsafe fn text<'t>(text: *const c_char, name: &str) -> Result<Option<&'t str>, Failure> {
    if text.is_null() {
        return Ok(None);
    }
    // SAFETY: it is not NULL, and the contract of this function says that it ends in zero and stays
    // unchanged.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str().map(Some).map_err(|_| Failure::argument(format!("{name} is not UTF-8")))
}

pub(crate) fn check_header(version: u32) -> Result<(), Failure> {
    if version == HEADER_VERSION {
        return Ok(());
    }
    Err(Failure::argument(format!(
        "header_version is {version}, expected {HEADER_VERSION}: the program was compiled with the header of another version, or \
         the options were not initialised with the macro"
    )))
}

/// Opens a group. Collective: all ranks call it.
///
/// On success `*group` is a handle that `peerlane_group_close` or `peerlane_group_destroy` must
/// get. Calls with the same group from several threads take turns. `options` may be NULL, which
/// means `PEERLANE_GROUP_OPTIONS_INIT`.
///
/// # Safety
/// `options` and `group` are NULL or point to such objects. The strings of the options are NULL or
/// end in zero.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerlane_group_open(
    options: *const GroupOptions,
    group: *mut *mut GroupHandle,
) -> Status {
    call(|| {
        // SAFETY: the contract of this function says that `group` is NULL or points to a handle.
        unsafe { clear(group, "group") }?;
        // SAFETY: the contract of this function says that `options` is NULL or points to options.
        let opened = match unsafe { options.as_ref() } {
            // SAFETY: the contract of this function covers the options, with the strings that they
            // point to.
            Some(options) => unsafe { open(options) }?,
            None => OpenOptions::default().from_env()?,
        };
        // SAFETY: the contract of this function says that `group` points to a handle; NULL has been
        // refused.
        unsafe { give_group(opened, group) }
    })
}

/// Opens a group as the options of a C program say.
///
/// # Safety
/// The strings of the options are NULL or end in zero.
unsafe fn open(given: &GroupOptions) -> Result<Group, Failure> {
    check_header(given.header_version)?;
    let mut options = OpenOptions::default();
    let group = peerlane::GroupOptions::default().strict(given.strict);
    let mut group = group.beside_compute(given.beside_compute);
    // SAFETY: the contract of this function says that the strings of the options end in zero.
    if let Some(name) = unsafe { text(given.backend, "backend") }? {
        let backend = name.parse::<Backend>();
        options = options.backend(backend.map_err(|error| Failure::argument(error.to_string()))?);
    }
    if let Ok(device) = u32::try_from(given.device) {
        options = options.device(device);
    }
    // SAFETY: the contract of this function says that the strings of the options end in zero.
    if let Some(label) = unsafe { text(given.label, "label") }? {
        group = group.label(label);
    }
    // SAFETY: the contract of this function says that the strings of the options end in zero.
    if let Some(engine) = unsafe { text(given.engine, "engine") }? {
        group = group.engine(engine);
    }
    if given.timeout_ms > 0 {
        group = group.timeout(milliseconds("timeout_ms", given.timeout_ms)?);
    }
    let mut start = START_TIMEOUT;
    if given.start_timeout_ms > 0 {
        start = milliseconds("start_timeout_ms", given.start_timeout_ms)?;
        group = group.start_timeout(start);
    }
    options = options.group(group);

    // SAFETY: the contract of this function says that the strings of the options end in zero.
    let Some(hub) = (unsafe { text(given.hub, "hub") })? else {
        if given.ranks > 0 {
            options = options.ranks(given.ranks as usize);
        }
        return Ok(options.from_env()?);
    };
    let mut environment = Environment::at_hub(hub, Rank(given.rank), given.ranks as usize);
    // SAFETY: the contract of this function says that the strings of the options end in zero.
    if let Some(secret) = unsafe { text(given.secret, "secret") }? {
        environment.secret = Some(Secret::new(secret)?);
    }
    Ok(options.open(TcpBootstrap::join(&environment, Deadline::after(start))?)?)
}

/// Opens a hub at an address such as `"127.0.0.1:0"`, through which `ranks` ranks open a group. It
/// must stay open as long as the group.
///
/// `secret` has at least 16 bytes, or is NULL for an address of this host only.
///
/// # Safety
/// The strings are NULL or end in zero; `hub` is NULL or points to a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerlane_hub_open(
    address: *const c_char,
    ranks: u32,
    secret: *const c_char,
    hub: *mut *mut HubHandle,
) -> Status {
    call(|| {
        // SAFETY: the contract of this function says that `hub` is NULL or points to a handle.
        unsafe { clear(hub, "hub") }?;
        // SAFETY: the contract of this function says that the strings are NULL or end in zero.
        let address = unsafe { text(address, "address") }?.unwrap_or("127.0.0.1:0");
        let mut options = HubOptions::default();
        // SAFETY: the contract of this function says that the strings are NULL or end in zero.
        if let Some(secret) = unsafe { text(secret, "secret") }? {
            options = options.secret(Secret::new(secret)?);
        }
        let bound = options.bind(address, ranks as usize)?;
        // SAFETY: the contract of this function says that `hub` points to a handle; NULL has been
        // refused.
        unsafe { HUBS.store_into(bound, hub) }
    })
}

/// Writes the address of a hub, such as `127.0.0.1:40123`, to `buffer`, as
/// `peerlane_group_selection` writes its text.
///
/// # Safety
/// `buffer` is NULL or has `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerlane_hub_address(
    hub: *const HubHandle,
    buffer: *mut c_char,
    size: usize,
) -> Status {
    call(|| {
        let address = HUBS.get(hub.addr())?.address().to_string();
        // SAFETY: the contract of this function says that `buffer` is NULL or has `size` bytes.
        unsafe { text_into(&address, buffer, size) }
    })
}

/// Closes a hub. Groups that were opened through it end.
#[unsafe(no_mangle)]
pub extern "C" fn peerlane_hub_close(hub: *mut HubHandle) -> Status {
    call(|| HUBS.remove(hub.addr()).map(drop))
}

/// Writes the rank of this process to `rank` and the number of ranks to `ranks`; either may be
/// NULL.
///
/// # Safety
/// `rank` and `ranks` are NULL or point to numbers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerlane_group_rank(
    group: *const GroupHandle,
    rank: *mut u32,
    ranks: *mut u32,
) -> Status {
    call(|| {
        let object = GROUPS.get(group.addr())?;
        for (to, value) in [(rank, object.rank), (ranks, object.ranks)] {
            if !to.is_null() {
                // SAFETY: it is not NULL, and the contract of this function says that it points to
                // a number then.
                unsafe { to.write(value) };
            }
        }
        Ok(())
    })
}

/// Writes which backends and which GPU the group uses, and why, to `buffer`, as text that ends in
/// zero.
///
/// If it does not fit into `size` bytes, the call fails, and `peerlane_error_needed_bytes` returns
/// how many are needed.
///
/// # Safety
/// `buffer` is NULL or has `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerlane_group_selection(
    group: *const GroupHandle,
    buffer: *mut c_char,
    size: usize,
) -> Status {
    call(|| {
        let object = GROUPS.get(group.addr())?;
        // SAFETY: the contract of this function says that `buffer` is NULL or has `size` bytes.
        unsafe { text_into(&object.selection, buffer, size) }
    })
}

/// Waits until all ranks have called it. Collective.
#[unsafe(no_mangle)]
pub extern "C" fn peerlane_group_barrier(group: *mut GroupHandle) -> Status {
    call(|| GROUPS.get(group.addr())?.with(|group| Ok(group.barrier()?)))
}

/// Writes the memory that the group holds on this rank to `buffer` as one JSON object, as
/// `peerlane_group_selection` writes its text.
///
/// `memory` is a list with an object for each kind of memory. Its fields are `kind` (`heap`,
/// `inboxes`, `flags`, `windows` or `buffers`), `bytes`, `space` (`host` or `device`), and
/// `device`, the number of the GPU or null.
///
/// `immediate` counts the immediate calls: `calls`, of which `hits` found an operation that the
/// group keeps, and `copied` copied memory; `operations` that the group keeps, and the `copy_bytes`
/// of its memory for copies.
///
/// `paths` is a list with an object for each way in which immediate calls ran: `collective`, `form`
/// of an all-reduce or null, `algorithm`, `engine`, and the number of `calls`.
///
/// # Safety
/// `buffer` is NULL or has `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerlane_group_stats(
    group: *mut GroupHandle,
    buffer: *mut c_char,
    size: usize,
) -> Status {
    call(|| {
        let stats = GROUPS.get(group.addr())?.with(|group| Ok(stats_json(&group.stats())))?;
        // SAFETY: the contract of this function says that `buffer` is NULL or has `size` bytes.
        unsafe { text_into(&stats, buffer, size) }
    })
}

/// Releases the memory of the heap that no operation uses any more, and writes the number of bytes
/// of this rank to `bytes`, which may be NULL. Collective.
///
/// # Safety
/// `bytes` is NULL or points to a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerlane_group_trim(group: *mut GroupHandle, bytes: *mut u64) -> Status {
    call(|| {
        let trimmed = GROUPS.get(group.addr())?.with(|group| Ok(group.trim()?))?;
        if !bytes.is_null() {
            // SAFETY: it is not NULL, and the contract of this function says that it points to a
            // number then.
            unsafe { bytes.write(trimmed) };
        }
        Ok(())
    })
}

/// Returns the error that has ended the group, or `PEERLANE_STATUS_OK`. It does not wait,
/// also while another thread uses the group.
#[unsafe(no_mangle)]
pub extern "C" fn peerlane_group_check(group: *const GroupHandle) -> Status {
    call(|| Ok(GROUPS.get(group.addr())?.end.check()?))
}

/// Writes a file descriptor for an event loop, which becomes readable when the group has ended or
/// was closed.
///
/// `peerlane_group_check` then returns the reason. Do not read from the descriptor, and do not
/// close it: the group keeps it until its handle is destroyed by `peerlane_group_close` or
/// `peerlane_group_destroy`.
///
/// # Safety
/// `descriptor` is NULL or points to an int.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerlane_group_end_descriptor(
    group: *const GroupHandle,
    descriptor: *mut c_int,
) -> Status {
    let end = || Ok(GROUPS.get(group.addr())?.end.as_fd().as_raw_fd());
    // SAFETY: this function has the same contract for `descriptor`.
    call(|| unsafe { descriptor_into(descriptor, end) })
}

/// Forms groups of the ranks that give the same color, ordered by key and then by rank. Collective.
///
/// A rank with a negative color gets no group: `*part` is NULL.
///
/// # Safety
/// `part` is NULL or points to a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerlane_group_split(
    group: *mut GroupHandle,
    color: i64,
    key: i64,
    part: *mut *mut GroupHandle,
) -> Status {
    call(|| {
        // SAFETY: the contract of this function says that `part` is NULL or points to a handle.
        let cleared = unsafe { clear(part, "part") };
        let color = |_: &Group| {
            cleared?;
            if color < 0 {
                return Ok(None);
            }
            u32::try_from(color).map(Some).map_err(|_| {
                Failure::argument(format!("color is {color}, expected at most {}", u32::MAX))
            })
        };
        let object = GROUPS.get(group.addr())?;
        let group = object.collective(color, |group, color| Ok(group.split(color, key)?))?;
        let Some(group) = group else { return Ok(()) };
        // SAFETY: the contract of this function says that `part` points to a handle; NULL has been
        // refused.
        unsafe { give_group(group, part) }
    })
}

/// Forms a group of `count` ranks, in the order of the list. Collective for all ranks of `group`;
/// each gives the list of its own group.
///
/// # Safety
/// `ranks` is NULL or has `count` numbers; `part` is NULL or points to a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerlane_group_subgroup(
    group: *mut GroupHandle,
    ranks: *const u32,
    count: usize,
    part: *mut *mut GroupHandle,
) -> Status {
    call(|| {
        // SAFETY: the contract of this function says that `part` is NULL or points to a handle.
        let cleared = unsafe { clear(part, "part") };
        let object = GROUPS.get(group.addr())?;
        let list = |_: &Group| {
            cleared?;
            if ranks.is_null() {
                return Err(Failure::argument("ranks is NULL, expected a list"));
            }
            if count > object.ranks as usize {
                return Err(Failure::argument(format!(
                    "count is {count}, expected at most {}, the number of ranks of the group",
                    object.ranks
                )));
            }
            // SAFETY: it is not NULL, and the contract of this function says that it has `count`
            // numbers then.
            let ranks = unsafe { std::slice::from_raw_parts(ranks, count) };
            Ok(ranks.iter().copied().map(Rank).collect::<Vec<_>>())
        };
        let subgroup = object.collective(list, |group, ranks| Ok(group.subgroup(&ranks)?))?;
        // SAFETY: the contract of this function says that `part` points to a handle; NULL has been
        // refused.
        unsafe { give_group(subgroup, part) }
    })
}

/// Opens a group of the remaining ranks after `group` has ended because a rank was lost. Every
/// remaining rank calls it.
///
/// # Safety
/// `rest` is NULL or points to a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerlane_group_shrink(
    group: *mut GroupHandle,
    rest: *mut *mut GroupHandle,
) -> Status {
    call(|| {
        // SAFETY: the contract of this function says that `rest` is NULL or points to a handle.
        unsafe { clear(rest, "rest") }?;
        let remaining = GROUPS.get(group.addr())?.with(|group| Ok(group.shrink()?))?;
        // SAFETY: the contract of this function says that `rest` points to a handle; NULL has been
        // refused.
        unsafe { give_group(remaining, rest) }
    })
}

/// Closes a group and destroys its handle, even if it fails. Collective. Destroy the operations,
/// calls and channels of the group first.
///
/// The handles of its windows are destroyed, too: the memory of `peerlane_window_allocate` must not
/// be used after the call.
#[unsafe(no_mangle)]
pub extern "C" fn peerlane_group_close(group: *mut GroupHandle) -> Status {
    call(|| {
        let object = GROUPS.remove(group.addr())?;
        let taken = lock(&object.group).take();
        let closed = taken.map_or(Ok(()), Group::close);
        drop_windows(group.addr());
        Ok(closed?)
    })
}

/// Destroys a group and the handles of its windows without the other ranks. Unless the group has
/// ended, they lose this rank.
#[unsafe(no_mangle)]
pub extern "C" fn peerlane_group_destroy(group: *mut GroupHandle) -> Status {
    call(|| {
        let object = GROUPS.remove(group.addr())?;
        drop(lock(&object.group).take());
        drop_windows(group.addr());
        Ok(())
    })
}
