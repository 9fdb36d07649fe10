//! Wraps the devices, protection domains and memory regions of libibverbs. Only this module contains raw
//! calls.
//!
//! Each type owns an object of libibverbs, destroys it when dropped, and keeps its parents alive.

mod queues;

use std::ffi::{CStr, c_int};
use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use ibverbs_sys::*;
use rustix::io::Errno;

use crate::error::Error;

pub(crate) use queues::{Cq, Qp, QpSizes, Srq};

pub(crate) fn library() -> Result<&'static Library, Error> {
    Library::load().map_err(|error| Error::no_library(&error))
}

/// Opens the RDMA devices that `accept` selects by index and name. Returns none if the kernel has no RDMA.
pub(crate) fn open_all(
    library: &'static Library,
    accept: impl Fn(usize, &str) -> bool,
) -> Result<Vec<Arc<Context>>, Error> {
    let mut count: c_int = 0;
    // SAFETY: the pointer to the count is valid for the call.
    let list = unsafe { (library.get_device_list)(&mut count) };
    if list.is_null() {
        let error = Error::last("ibv_get_device_list", &"this machine".into());
        return match error {
            Error::Verbs { errno: Errno::NOSYS, .. } => Ok(Vec::new()),
            error => Err(error),
        };
    }
    let count = usize::try_from(count).unwrap_or(0);
    // SAFETY: the list has `count` entries.
    let devices = unsafe { std::slice::from_raw_parts(list, count) };
    let mut opened = Ok(Vec::new());
    for (index, device) in devices.iter().enumerate() {
        // SAFETY: the device belongs to the list, which is not freed yet.
        let name = unsafe { (library.get_device_name)(*device) };
        // SAFETY: the name ends with a zero and is valid as long as the list.
        let name = unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned();
        if !accept(index, &name) {
            continue;
        }
        let context = Context::open(library, *device, name.into());
        let Ok(contexts) = &mut opened else { break };
        match context {
            Ok(context) => contexts.push(Arc::new(context)),
            Err(error) => opened = Err(error),
        }
    }
    // SAFETY: the library made the list, and it is freed once. Opened devices stay valid without it.
    unsafe { (library.free_device_list)(list) };
    opened
}

pub(crate) fn names(library: &'static Library) -> Result<Vec<String>, Error> {
    let names = std::sync::Mutex::new(Vec::new());
    open_all(library, |_, name| {
        names.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push(name.to_owned());
        false
    })?;
    Ok(names.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner))
}

/// An opened RDMA device (`ibv_context`).
#[derive(Debug)]
pub(crate) struct Context {
    pub(crate) library: &'static Library,
    pub(crate) name: Arc<str>,
    raw: NonNull<ibv_context>,
}

// SAFETY: libibverbs may be called from any thread.
unsafe impl Send for Context {}
// SAFETY: as above; the library locks its state.
unsafe impl Sync for Context {}

impl Context {
    fn open(
        library: &'static Library,
        device: *mut ibv_device,
        name: Arc<str>,
    ) -> Result<Self, Error> {
        // SAFETY: the device belongs to a list that is not freed yet.
        let raw = unsafe { (library.open_device)(device) };
        let raw = NonNull::new(raw).ok_or_else(|| Error::last("ibv_open_device", &name))?;
        Ok(Self { library, name, raw })
    }

    pub(crate) fn raw(&self) -> *mut ibv_context {
        self.raw.as_ptr()
    }

    pub(crate) fn attributes(&self) -> Result<ibv_device_attr, Error> {
        let mut attributes = ibv_device_attr::default();
        // SAFETY: the context is open, and the structure has the layout of the library.
        let code = unsafe { (self.library.query_device)(self.raw(), &mut attributes) };
        self.check("ibv_query_device", code).map(|()| attributes)
    }

    pub(crate) fn completion_vectors(&self) -> u32 {
        // SAFETY: the context is open, and the library fills this field when it opens it.
        let vectors = unsafe { (*self.raw()).num_comp_vectors };
        vectors.max(0).cast_unsigned()
    }

    pub(crate) fn port(&self, port: u8) -> Result<ibv_port_attr, Error> {
        let mut attributes = ibv_port_attr::default();
        // SAFETY: as above.
        let code = unsafe { (self.library.query_port)(self.raw(), port, &mut attributes) };
        self.check("ibv_query_port", code).map(|()| attributes)
    }

    /// Returns an entry of a port's GID table and its type; `None` for an empty entry.
    pub(crate) fn gid(&self, port: u8, index: u32) -> Option<ibv_gid_entry> {
        let mut entry = ibv_gid_entry::default();
        // SAFETY: the context is open; the library refuses ports that do not exist.
        let code =
            unsafe { query_gid_entry(self.library, self.raw(), port.into(), index, &mut entry) };
        match code {
            Some(0) => Some(entry),
            Some(_) => None,
            None => self.gid_of_old_library(port, index),
        }
    }

    /// Reads a GID table entry with a libibverbs without `ibv_query_gid_ex`; the kernel gives the type of the entry.
    fn gid_of_old_library(&self, port: u8, index: u32) -> Option<ibv_gid_entry> {
        let position = c_int::try_from(index).ok()?;
        let mut gid = ibv_gid::default();
        // SAFETY: as above.
        let code = unsafe { (self.library.query_gid)(self.raw(), port, position, &mut gid) };
        let path =
            format!("/sys/class/infiniband/{}/ports/{port}/gid_attrs/types/{index}", self.name);
        let gid_type = match std::fs::read_to_string(path).unwrap_or_default().trim() {
            "RoCE v2" => IBV_GID_TYPE_ROCE_V2,
            _ => IBV_GID_TYPE_ROCE_V1,
        };
        let entry = ibv_gid_entry { gid, gid_index: index, gid_type, ..ibv_gid_entry::default() };
        (code == 0 && gid != ibv_gid::default()).then_some(entry)
    }

    pub(crate) fn event_fd(&self) -> c_int {
        // SAFETY: the context is open.
        unsafe { (*self.raw()).async_fd }
    }

    /// Returns the next asynchronous event of the device; must be called only when the event descriptor is readable.
    pub(crate) fn event(&self) -> Result<(ibv_event_type, String), Error> {
        let mut event =
            ibv_async_event { element: std::ptr::null_mut(), event_type: ibv_event_type(0) };
        // SAFETY: the context is open, and the structure has the layout of the library.
        let code = unsafe { (self.library.get_async_event)(self.raw(), &mut event) };
        if code != 0 {
            return Err(Error::last("ibv_get_async_event", &self.name));
        }
        // SAFETY: the event was just taken, and is acknowledged once.
        unsafe { (self.library.ack_async_event)(&mut event) };
        // SAFETY: the library returns a constant string for every number.
        let text = unsafe { (self.library.event_type_str)(event.event_type) };
        // SAFETY: as above.
        let text = unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned();
        Ok((event.event_type, text))
    }

    pub(crate) fn status_text(&self, status: ibv_wc_status) -> String {
        // SAFETY: the library returns a constant string for every number.
        let text = unsafe { (self.library.wc_status_str)(status) };
        // SAFETY: as above.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }

    pub(crate) fn check(&self, call: &'static str, code: c_int) -> Result<(), Error> {
        match code {
            0 => Ok(()),
            code => Err(Error::from_code(call, &self.name, code)),
        }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: every object of the context keeps it alive, so none is left.
        let _ = unsafe { (self.library.close_device)(self.raw()) };
    }
}

/// A protection domain of an RDMA device (`ibv_pd`).
#[derive(Debug)]
pub(crate) struct Domain {
    pub(crate) context: Arc<Context>,
    raw: NonNull<ibv_pd>,
}

// SAFETY: as for `Context`.
unsafe impl Send for Domain {}
// SAFETY: as for `Context`.
unsafe impl Sync for Domain {}

impl Domain {
    pub(crate) fn open(context: Arc<Context>) -> Result<Self, Error> {
        // SAFETY: the context is open.
        let raw = unsafe { (context.library.alloc_pd)(context.raw()) };
        let raw = NonNull::new(raw).ok_or_else(|| Error::last("ibv_alloc_pd", &context.name))?;
        Ok(Self { context, raw })
    }

    /// Registers memory with the NIC, so that peers can write and read it.
    ///
    /// # Safety
    /// The memory must stay allocated until the result is dropped.
    pub(crate) unsafe fn register(
        self: &Arc<Self>,
        base: NonNull<u8>,
        bytes: usize,
    ) -> Result<Mr, Error> {
        let access = ibv_access_flags::LOCAL_WRITE
            | ibv_access_flags::REMOTE_WRITE
            | ibv_access_flags::REMOTE_READ;
        let register = self.context.library.reg_mr;
        let start = base.as_ptr().cast();
        // SAFETY: the domain is open; the caller keeps the memory allocated.
        let raw = unsafe { register(self.raw.as_ptr(), start, bytes, access.bits().cast_signed()) };
        let raw = NonNull::new(raw).ok_or_else(|| {
            let device = Arc::clone(&self.context.name);
            match Error::last("ibv_reg_mr", &device) {
                Error::Verbs { errno, .. } => {
                    Error::NotLocked { bytes: bytes as u64, device, errno }
                }
                error => error,
            }
        })?;
        Ok(Mr { domain: Arc::clone(self), raw })
    }

    /// Registers `bytes` bytes of a dma-buf from `offset`; work requests address the first byte as `address`.
    ///
    /// # Safety
    /// The memory behind the dma-buf must stay allocated until the registration is dropped.
    pub(crate) unsafe fn register_dma_buf(
        self: &Arc<Self>,
        fd: BorrowedFd<'_>,
        offset: u64,
        bytes: usize,
        address: u64,
    ) -> Result<Mr, Error> {
        let access = ibv_access_flags::LOCAL_WRITE
            | ibv_access_flags::REMOTE_WRITE
            | ibv_access_flags::REMOTE_READ;
        let Some(register) = self.context.library.reg_dmabuf_mr else {
            let text =
                format!("{LIBRARY} has no ibv_reg_dmabuf_mr, expected rdma-core 34 or newer");
            return Err(Error::unavailable(text));
        };
        let (domain, fd, access) = (self.raw.as_ptr(), fd.as_raw_fd(), access.bits().cast_signed());
        // SAFETY: the domain and the descriptor are open; the caller keeps the memory allocated.
        let raw = unsafe { register(domain, offset, bytes, address, fd, access) };
        let raw = NonNull::new(raw);
        let raw = raw.ok_or_else(|| Error::last("ibv_reg_dmabuf_mr", &self.context.name))?;
        Ok(Mr { domain: Arc::clone(self), raw })
    }
}

impl Domain {
    /// Tries to register an invalid file as a dma-buf, and returns the error; `None` if the library does not
    /// support dma-bufs.
    pub(crate) fn refuse_dmabuf(&self) -> Option<Errno> {
        let register = self.context.library.reg_dmabuf_mr?;
        let access = ibv_access_flags::LOCAL_WRITE.bits().cast_signed();
        // SAFETY: the domain is open, and -1 is no file, so nothing can be registered.
        let registered = unsafe { register(self.raw.as_ptr(), 0, 4096, 0, -1, access) };
        if registered.is_null() {
            return Errno::from_io_error(&std::io::Error::last_os_error());
        }
        // SAFETY: it was registered right above and is not used.
        let _ = unsafe { (self.context.library.dereg_mr)(registered) };
        None
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        // SAFETY: every object of the domain keeps it alive, so none is left.
        let _ = unsafe { (self.context.library.dealloc_pd)(self.raw.as_ptr()) };
    }
}

/// A memory region that is registered with a NIC (`ibv_mr`).
#[derive(Debug)]
pub(crate) struct Mr {
    domain: Arc<Domain>,
    raw: NonNull<ibv_mr>,
}

// SAFETY: as for `Context`.
unsafe impl Send for Mr {}
// SAFETY: as for `Context`.
unsafe impl Sync for Mr {}

impl Mr {
    pub(crate) fn local_key(&self) -> u32 {
        // SAFETY: the region is registered until `self` is dropped, and its keys never change.
        unsafe { (*self.raw.as_ptr()).lkey }
    }

    pub(crate) fn remote_key(&self) -> u32 {
        // SAFETY: as above.
        unsafe { (*self.raw.as_ptr()).rkey }
    }
}

impl Drop for Mr {
    fn drop(&mut self) {
        // SAFETY: `self` is the only owner of the registration.
        let _ = unsafe { (self.domain.context.library.dereg_mr)(self.raw.as_ptr()) };
    }
}
