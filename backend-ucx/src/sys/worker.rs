//! Wraps workers with their endpoints, and the requests of sends, receives and flushes.

use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::fmt;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI8, Ordering};
use std::time::{Duration, Instant};

use super::ffi::*;
use super::{Context, failed_with};
use crate::error::{Error, Status};

/// The number of the only kind of messages.
const MESSAGE_ID: u32 = 0;
/// The largest number of bytes of a header.
const HEADER_BYTES_MAX: usize = 128;
/// The number of calls that make progress at once, so that a caller returns to its own work.
const PROGRESS_CALLS_MAX: usize = 64;
/// The longest wait until the last bytes of a worker have left, before it is destroyed.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// How a request has ended.
pub(crate) type Ended = Result<(), Status>;

/// Handles the messages that arrive at a worker.
pub(crate) trait Receiver: Send + 'static {
    /// Takes a message whose bytes have arrived.
    fn eager(&mut self, calls: &Calls, header: &[u8], payload: &[u8], reply: Option<ReplyTo<'_>>);

    /// Takes a message whose bytes the sender holds, which it [receives](Calls::receive) or
    /// [drops](Calls::drop_rendezvous).
    fn rendezvous(&mut self, calls: &Calls, header: &[u8], bytes: usize, message: Rendezvous);

    /// Learns that the bytes of a message that it receives are in their place, or why not.
    fn received(&mut self, calls: &Calls, tag: u64, ended: Ended);
}

/// A message whose bytes have not arrived.
#[derive(Debug)]
pub(crate) struct Rendezvous(NonNull<c_void>);

// SAFETY: a descriptor may be used by any thread that has the worker.
unsafe impl Send for Rendezvous {}

/// The sender of a message that asks for a reply. UCX keeps its endpoint while it hands over the
/// message, and no longer.
#[derive(Debug)]
pub(crate) struct ReplyTo<'a>(ucp_ep_h, PhantomData<&'a ()>);

/// Learns that a send or flush has ended, while the caller holds the worker.
pub(crate) trait Completion: Send + Sync {
    /// Says how the request with the number `tag` has ended.
    fn complete(&self, tag: u64, ended: Ended);
}

/// The calls that a receiver may make.
pub(crate) struct Calls {
    library: &'static Library,
    worker: ucp_worker_h,
    /// The [`State`] of the worker, for the callback of receives.
    state: *mut c_void,
    on_received: unsafe extern "C" fn(*mut c_void, ucs_status_t, usize, *mut c_void),
    /// The message that UCX is in a call for, until the receiver has taken it.
    arriving: Cell<*mut c_void>,
}

/// What callbacks of UCX get: the receiver, and the calls that it may make.
struct State<R> {
    receiver: R,
    calls: Calls,
}

/// A receive, for its callback.
struct Receiving {
    library: &'static Library,
    state: *mut c_void,
    tag: u64,
    /// Whether the call that starts the receive has not returned. UCX may call back within it, when
    /// the receiver is in use.
    is_starting: Cell<bool>,
    /// How the receive has ended within the call that starts it.
    ended: Cell<Option<Ended>>,
}

impl Calls {
    /// Receives the bytes of a message at an address. Returns how it has ended, or `None` if the
    /// receiver [learns](Receiver::received) it by the number `tag`.
    ///
    /// # Safety
    /// `bytes` bytes at the address may be written until then.
    pub(crate) unsafe fn receive(
        &self,
        message: Rendezvous,
        (at, bytes): (*mut u8, usize),
        tag: u64,
    ) -> Option<Ended> {
        let receiving = Box::into_raw(Box::new(Receiving {
            library: self.library,
            state: self.state,
            tag,
            is_starting: Cell::new(true),
            ended: Cell::new(None),
        }));
        let callback = ucp_request_callback { recv_am: self.on_received };
        let param = request_param(callback, receiving.cast(), 0);
        let (worker, descriptor) = (self.worker, message.0.as_ptr());
        // SAFETY: the descriptor is of this worker and used once; the caller keeps the memory.
        let request =
            unsafe { (self.library.am_receive)(worker, descriptor, at.cast(), bytes, &param) };

        // SAFETY: the callback has left the box, because the receive was starting.
        let this = unsafe { &*receiving };
        let ended = ended(request).or_else(|| this.ended.take());
        this.is_starting.set(false);
        if ended.is_some() {
            // SAFETY: the request has ended, so that no callback takes the box.
            drop(unsafe { Box::from_raw(receiving) });
        }
        ended
    }

    /// Replies to a message with one without bytes, whose loss its receiver notices.
    pub(crate) fn reply(&self, to: &ReplyTo<'_>, header: &[u8]) {
        let completion: Arc<dyn Completion> = Arc::new(Unnoticed);
        let request = Request::new(self.library, &completion, 0, header);
        // SAFETY: UCX keeps the endpoint as long as the borrow, and there are no bytes.
        let _ = unsafe { request.send(to.0, (ptr::null(), 0), 0) };
    }

    /// Lets the sender of a message go on without its bytes.
    pub(crate) fn drop_rendezvous(&self, message: Rendezvous) {
        let descriptor = message.0.as_ptr();
        if self.arriving.get() == descriptor {
            // The callback drops it, by what it returns.
            self.arriving.set(ptr::null_mut());
            return;
        }
        // SAFETY: the descriptor is of this worker and used once.
        unsafe { (self.library.am_release)(self.worker, descriptor) };
    }
}

/// Returns how a request has ended that a call has returned, or `None` if it goes on.
fn ended(request: ucs_status_ptr_t) -> Option<Ended> {
    if request.is_null() {
        return Some(Ok(()));
    }

    let number = request as usize;
    let is_error = number >= isize::from(UCS_ERR_LAST).cast_unsigned();
    is_error.then(|| Err(failed_with(number.cast_signed() as ucs_status_t)))
}

fn request_param(
    callback: ucp_request_callback,
    user_data: *mut c_void,
    flags: u32,
) -> ucp_request_param_t {
    ucp_request_param_t {
        op_attr_mask: UCP_OP_ATTR_FIELD_CALLBACK
            | UCP_OP_ATTR_FIELD_USER_DATA
            | UCP_OP_ATTR_FIELD_FLAGS,
        flags,
        request: ptr::null_mut(),
        cb: callback,
        datatype: 0,
        user_data,
        reply_buffer: ptr::null_mut(),
        memory_type: 0,
        recv_info: ptr::null_mut(),
        memh: ptr::null_mut(),
    }
}

/// A worker of UCX (`ucp_worker_h`) with its endpoints, and what receives its messages.
pub(crate) struct Worker<R: Receiver> {
    raw: ucp_worker_h,
    /// Owned by the worker; callbacks use it within its calls.
    state: NonNull<State<R>>,
    endpoints: Vec<Endpoint>,
    context: Arc<Context>,
}

// SAFETY: the worker is created for one thread at a time (`UCS_THREAD_MODE_SERIALIZED`), and all
// calls that change it need exclusive access.
unsafe impl<R: Receiver> Send for Worker<R> {}

/// An endpoint of UCX (`ucp_ep_h`), which sends to a worker of a peer.
struct Endpoint {
    raw: ucp_ep_h,
    failure: Arc<Failure>,
    is_open: bool,
    loss: OnLoss,
}

/// What UCX does when a peer is lost.
///
/// Shared memory does not notice it, so that UCX 1.13 does not use it for endpoints that report it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OnLoss {
    /// The endpoint fails, and can be closed at any time.
    Report,
    /// Nothing, and the endpoint lives as long as the worker.
    Ignore,
}

/// The status of an endpoint that has failed, 0 as long as it works.
#[derive(Debug, Default)]
struct Failure(AtomicI8);

/// The number of an endpoint of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct EndpointId(usize);

impl<R: Receiver> Worker<R> {
    pub(crate) fn create(context: &Arc<Context>, receiver: R) -> Result<Self, Error> {
        let library = context.library;
        // SAFETY: all fields are numbers or pointers, of which only those of the mask are read.
        let mut params: ucp_worker_params_t = unsafe { MaybeUninit::zeroed().assume_init() };
        params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
        params.thread_mode = UCS_THREAD_MODE_SERIALIZED;
        let mut raw = ptr::null_mut();
        // SAFETY: the context lives, and the pointers are valid for the call.
        let status = unsafe { (library.worker_create)(context.raw, &params, &mut raw) };
        context.check("ucp_worker_create", status)?;

        let on_received = on_received::<R>;
        let (state, arriving) = (ptr::null_mut(), Cell::new(ptr::null_mut()));
        let calls = Calls { library, worker: raw, state, on_received, arriving };
        let state = NonNull::from(Box::leak(Box::new(State { receiver, calls })));
        let context = Arc::clone(context);
        let mut worker = Self { raw, state, endpoints: Vec::new(), context };
        worker.state().calls.state = state.as_ptr().cast();

        let param = ucp_am_handler_param_t {
            field_mask: UCP_AM_HANDLER_PARAM_FIELD_ID
                | UCP_AM_HANDLER_PARAM_FIELD_CB
                | UCP_AM_HANDLER_PARAM_FIELD_ARG,
            id: MESSAGE_ID,
            flags: 0,
            cb: on_message::<R>,
            arg: state.as_ptr().cast(),
        };
        // SAFETY: the worker lives, and keeps the state until it is destroyed.
        let status = unsafe { (library.set_handler)(raw, &param) };
        worker.context.check("ucp_worker_set_am_recv_handler", status)?;
        Ok(worker)
    }

    /// Returns what receives the messages, with the calls that it may make.
    pub(crate) fn receiver(&mut self) -> (&mut R, &Calls) {
        let State { receiver, calls } = self.state();
        (receiver, calls)
    }

    fn state(&mut self) -> &mut State<R> {
        // SAFETY: the worker owns the state. Callbacks, which use it too, run only within calls
        // that have exclusive access to the worker.
        unsafe { self.state.as_mut() }
    }

    /// Returns the address that peers need to connect to the worker.
    pub(crate) fn address(&self) -> Result<Vec<u8>, Error> {
        let (library, mut address, mut length) = (self.context.library, ptr::null_mut(), 0);
        // SAFETY: the worker lives, and the pointers are valid for the call.
        let status = unsafe { (library.get_address)(self.raw, &mut address, &mut length) };
        self.context.check("ucp_worker_get_address", status)?;
        // SAFETY: the library has returned so many bytes.
        let bytes = unsafe { std::slice::from_raw_parts(address.cast::<u8>(), length) }.to_vec();
        // SAFETY: the address is of this worker, and released once.
        unsafe { (library.release_address)(self.raw, address) };
        Ok(bytes)
    }

    /// Returns a descriptor that is readable when an [armed](Self::arm) worker may make progress.
    pub(crate) fn event_fd(&self) -> Result<OwnedFd, Error> {
        let mut event_fd: c_int = -1;
        // SAFETY: the worker lives, and the pointer is valid for the call.
        let status = unsafe { (self.context.library.get_efd)(self.raw, &mut event_fd) };
        self.context.check("ucp_worker_get_efd", status)?;
        // SAFETY: the descriptor is open as long as the worker lives.
        let event_fd = unsafe { BorrowedFd::borrow_raw(event_fd) };
        event_fd.try_clone_to_owned().map_err(Error::io("duplicate the descriptor of a worker"))
    }

    /// Makes the descriptor report the next event. Returns false if there are events already.
    pub(crate) fn arm(&mut self) -> Result<bool, Error> {
        // SAFETY: the worker lives.
        match unsafe { (self.context.library.arm)(self.raw) } {
            UCS_ERR_BUSY => Ok(false),
            status => self.context.check("ucp_worker_arm", status).map(|()| true),
        }
    }

    /// Receives and sends what is possible now. Returns whether something has happened.
    pub(crate) fn progress(&mut self) -> bool {
        // SAFETY: the worker lives. Callbacks use its state, to which no reference exists now.
        let call = || unsafe { (self.context.library.progress)(self.raw) } > 0;
        let mut calls = 0;
        while calls < PROGRESS_CALLS_MAX && call() {
            calls += 1;
        }
        calls > 0
    }

    /// Creates an endpoint that sends to the worker of this address.
    pub(crate) fn connect(&mut self, address: &[u8], loss: OnLoss) -> Result<EndpointId, Error> {
        let failure = Arc::new(Failure::default());
        let none = || ucs_sock_addr_t { addr: ptr::null(), addrlen: 0 };
        let params = ucp_ep_params_t {
            field_mask: UCP_EP_PARAM_FIELD_REMOTE_ADDRESS
                | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE
                | UCP_EP_PARAM_FIELD_ERR_HANDLER,
            address: address.as_ptr().cast(),
            err_mode: match loss {
                OnLoss::Report => UCP_ERR_HANDLING_MODE_PEER,
                OnLoss::Ignore => UCP_ERR_HANDLING_MODE_NONE,
            },
            err_handler: ucp_err_handler_t {
                cb: on_error,
                arg: Arc::as_ptr(&failure).cast_mut().cast(),
            },
            user_data: ptr::null_mut(),
            flags: 0,
            sockaddr: none(),
            conn_request: ptr::null_mut(),
            name: ptr::null(),
            local_sockaddr: none(),
        };

        let mut raw = ptr::null_mut();
        // SAFETY: the worker lives. Address and parameters are valid for the call, and the failure
        // until the worker is destroyed.
        let status = unsafe { (self.context.library.ep_create)(self.raw, &params, &mut raw) };
        self.context.check("ucp_ep_create", status)?;
        self.endpoints.push(Endpoint { raw, failure, is_open: true, loss });
        Ok(EndpointId(self.endpoints.len() - 1))
    }

    /// Returns why an endpoint has failed, or `None` if it works.
    pub(crate) fn failure(&self, endpoint: EndpointId) -> Option<Status> {
        match self.endpoints[endpoint.0].failure.0.load(Ordering::Relaxed) {
            UCS_OK => None,
            status => Some(failed_with(status)),
        }
    }

    /// Sends a message, its header and its bytes. Returns how the send has ended, or `None` if
    /// `completion` is told.
    ///
    /// # Safety
    /// The bytes can be read, and do not change until the send ends.
    pub(crate) unsafe fn send(
        &mut self,
        endpoint: EndpointId,
        header: &[u8],
        payload: (*const u8, usize),
        completion: &Arc<dyn Completion>,
        tag: u64,
    ) -> Option<Ended> {
        let raw = self.endpoints[endpoint.0].raw;
        let request = Request::new(self.context.library, completion, tag, header);
        // SAFETY: the endpoint is open, and the caller keeps the bytes.
        unsafe { request.send(raw, payload, 0) }
    }

    /// Sends a message without bytes that asks for a reply.
    pub(crate) fn send_question(&mut self, endpoint: EndpointId, header: &[u8]) -> Option<Ended> {
        let raw = self.endpoints[endpoint.0].raw;
        let completion: Arc<dyn Completion> = Arc::new(Unnoticed);
        let request = Request::new(self.context.library, &completion, 0, header);
        // SAFETY: the endpoint is open, and there are no bytes.
        unsafe { request.send(raw, (ptr::null(), 0), UCP_AM_SEND_FLAG_REPLY) }
    }

    /// Waits until everything that was sent to an endpoint has left this process. Returns how it
    /// has ended, or `None` if `completion` is told.
    fn flush(
        &mut self,
        endpoint: EndpointId,
        completion: &Arc<dyn Completion>,
        tag: u64,
    ) -> Option<Ended> {
        let raw = self.endpoints[endpoint.0].raw;
        let request = Request::new(self.context.library, completion, tag, &[]);
        // SAFETY: the endpoint is open.
        request.start(0, |library, param| unsafe { (library.ep_flush)(raw, param) })
    }

    /// Closes an endpoint, so that its requests end with an error and nothing more is sent. Its
    /// number must not be used any more. Returns false if it is one that cannot be closed.
    pub(crate) fn abandon(&mut self, endpoint: EndpointId) -> bool {
        self.close(endpoint);
        self.endpoints[endpoint.0].loss == OnLoss::Report
    }

    /// Closes an endpoint. Returns what tells when it is closed, or `None` if it is.
    fn close(&mut self, endpoint: EndpointId) -> Option<Arc<EndOfRequest>> {
        let Endpoint { raw, is_open, loss, .. } = &mut self.endpoints[endpoint.0];
        if *loss == OnLoss::Ignore || !std::mem::take(is_open) {
            return None;
        }

        let raw = *raw;
        let end = Arc::new(EndOfRequest::default());
        let completion: Arc<dyn Completion> = Arc::clone(&end) as _;
        let request = Request::new(self.context.library, &completion, 0, &[]);
        // SAFETY: the endpoint is open, and is closed once.
        let ended = request.start(UCP_EP_CLOSE_FLAG_FORCE, |library, param| unsafe {
            (library.ep_close)(raw, param)
        });
        ended.is_none().then_some(end)
    }

    /// Waits until what was sent has left this process, and closes all endpoints; both within a
    /// bound.
    fn shut_down(&mut self) {
        let all = || (0..).map(EndpointId);
        let mut ends = Vec::new();
        for endpoint in all().take(self.endpoints.len()) {
            if self.endpoints[endpoint.0].is_open && self.failure(endpoint).is_none() {
                let end = Arc::new(EndOfRequest::default());
                let completion: Arc<dyn Completion> = Arc::clone(&end) as _;
                if self.flush(endpoint, &completion, 0).is_none() {
                    ends.push(end);
                }
            }
        }
        self.wait_for(&ends);

        let ends: Vec<_> =
            all().take(self.endpoints.len()).filter_map(|endpoint| self.close(endpoint)).collect();
        self.wait_for(&ends);
    }

    fn wait_for(&mut self, ends: &[Arc<EndOfRequest>]) {
        let limit = Instant::now() + CLOSE_TIMEOUT;
        let is_open = |end: &Arc<EndOfRequest>| !end.0.load(Ordering::Relaxed);
        while ends.iter().any(is_open) && Instant::now() < limit {
            if !self.progress() {
                std::thread::yield_now();
            }
        }
    }
}

impl<R: Receiver> Drop for Worker<R> {
    fn drop(&mut self) {
        self.shut_down();
        // SAFETY: the worker is destroyed once.
        unsafe { (self.context.library.worker_destroy)(self.raw) };
        // SAFETY: the state was leaked from a box, and no callback uses it any more.
        drop(unsafe { Box::from_raw(self.state.as_ptr()) });
    }
}

impl<R: Receiver> fmt::Debug for Worker<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Worker").finish_non_exhaustive()
    }
}

/// Tells whether a request has ended.
#[derive(Debug, Default)]
struct EndOfRequest(AtomicBool);

impl Completion for EndOfRequest {
    fn complete(&self, _tag: u64, _ended: Ended) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Takes the end of a message whose loss is noticed otherwise.
#[derive(Debug)]
struct Unnoticed;

impl Completion for Unnoticed {
    fn complete(&self, _tag: u64, _ended: Ended) {}
}

/// A send, flush or close, with the header of a send, which must not move until it ends.
struct Request {
    library: &'static Library,
    completion: Arc<dyn Completion>,
    tag: u64,
    header: [u8; HEADER_BYTES_MAX],
    header_bytes: usize,
}

impl Request {
    fn new(
        library: &'static Library,
        completion: &Arc<dyn Completion>,
        tag: u64,
        header: &[u8],
    ) -> Box<Self> {
        let completion = Arc::clone(completion);
        let header_bytes = header.len();
        let mut request = Box::new(Self {
            library,
            completion,
            tag,
            header: [0; HEADER_BYTES_MAX],
            header_bytes,
        });
        request.header[..header_bytes].copy_from_slice(header);
        request
    }

    /// Sends the header with bytes to an endpoint.
    ///
    /// # Safety
    /// The endpoint is open. The bytes can be read, and do not change until the send ends.
    unsafe fn send(
        self: Box<Self>,
        endpoint: ucp_ep_h,
        (payload, bytes): (*const u8, usize),
        flags: u32,
    ) -> Option<Ended> {
        let (header, header_bytes) = (self.header.as_ptr().cast(), self.header_bytes);
        self.start(flags, |library, param| {
            let payload = payload.cast();
            // SAFETY: the endpoint and the bytes are the caller's; the header is in the box, which
            // lives until the request ends.
            unsafe {
                (library.am_send)(endpoint, MESSAGE_ID, header, header_bytes, payload, bytes, param)
            }
        })
    }

    /// Makes the call of a request. Returns how it has ended, or `None` if the completion is told.
    fn start(
        self: Box<Self>,
        flags: u32,
        call: impl FnOnce(&'static Library, &ucp_request_param_t) -> ucs_status_ptr_t,
    ) -> Option<Ended> {
        let library = self.library;
        let this = Box::into_raw(self);
        let callback = ucp_request_callback { send: on_sent };
        let request = call(library, &request_param(callback, this.cast(), flags));

        let ended = ended(request);
        if ended.is_some() {
            // SAFETY: the request has ended, so that no callback takes the box.
            drop(unsafe { Box::from_raw(this) });
        }
        ended
    }
}

fn status_of(status: ucs_status_t) -> Ended {
    if status == UCS_OK { Ok(()) } else { Err(failed_with(status)) }
}

/// Tells the completion that a send, flush or close has ended.
unsafe extern "C" fn on_sent(request: *mut c_void, status: ucs_status_t, user_data: *mut c_void) {
    // SAFETY: the pointer is that of `start`, and UCX calls once for each request.
    let this = unsafe { Box::from_raw(user_data.cast::<Request>()) };
    // SAFETY: the request has ended, and is freed once.
    unsafe { (this.library.request_free)(request) };
    this.completion.complete(this.tag, status_of(status));
}

/// Tells the receiver that the bytes of a message are in their place.
unsafe extern "C" fn on_received<R: Receiver>(
    request: *mut c_void,
    status: ucs_status_t,
    _bytes: usize,
    user_data: *mut c_void,
) {
    let receiving = user_data.cast::<Receiving>();
    // SAFETY: the pointer is that of `receive`, whose box lives until its receive has ended.
    let this = unsafe { &*receiving };
    // SAFETY: the request has ended, and is freed once.
    unsafe { (this.library.request_free)(request) };
    if this.is_starting.get() {
        this.ended.set(Some(status_of(status)));
        return;
    }

    // SAFETY: UCX calls once for each request, so the box is taken once.
    let Receiving { state, tag, .. } = *unsafe { Box::from_raw(receiving) };
    // SAFETY: the state is that of the worker, which is in a call that lends it to callbacks. The
    // receiver is not in use, because no receive is starting.
    let State { receiver, calls } = unsafe { &mut *state.cast::<State<R>>() };
    receiver.received(calls, tag, status_of(status));
}

/// Hands a message to the receiver.
unsafe extern "C" fn on_message<R: Receiver>(
    arg: *mut c_void,
    header: *const c_void,
    header_bytes: usize,
    data: *mut c_void,
    bytes: usize,
    param: *const ucp_am_recv_param_t,
) -> ucs_status_t {
    // SAFETY: the state is that of the worker, which is in a call that lends it to callbacks.
    let State { receiver, calls } = unsafe { &mut *arg.cast::<State<R>>() };
    // SAFETY: the header has so many bytes.
    let header = unsafe { bytes_at(header, header_bytes) };
    // SAFETY: the parameters are valid for the call.
    let param = unsafe { &*param };
    if param.recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV != 0
        && let Some(descriptor) = NonNull::new(data)
    {
        calls.arriving.set(data);
        receiver.rendezvous(calls, header, bytes, Rendezvous(descriptor));
        // The receiver keeps the descriptor, or has dropped it.
        let is_dropped = calls.arriving.replace(ptr::null_mut()).is_null();
        return if is_dropped { UCS_OK } else { UCS_INPROGRESS };
    }

    let asks = param.recv_attr & UCP_AM_RECV_ATTR_FIELD_REPLY_EP != 0;
    let reply = asks.then_some(ReplyTo(param.reply_ep, PhantomData));
    // SAFETY: the message has so many bytes.
    receiver.eager(calls, header, unsafe { bytes_at(data, bytes) }, reply);
    UCS_OK
}

/// Returns bytes at an address, which may be null if there are none.
///
/// # Safety
/// So many bytes are there as long as the result is used.
unsafe fn bytes_at<'a>(data: *const c_void, bytes: usize) -> &'a [u8] {
    if bytes == 0 {
        return &[];
    }
    // SAFETY: the caller's.
    unsafe { std::slice::from_raw_parts(data.cast(), bytes) }
}

/// Notes that an endpoint has failed.
unsafe extern "C" fn on_error(arg: *mut c_void, _endpoint: ucp_ep_h, status: ucs_status_t) {
    // SAFETY: the worker keeps the failure until it is destroyed.
    let failure = unsafe { &*arg.cast::<Failure>() };
    failure.0.store(status, Ordering::Relaxed);
}
