"""Generates the vector classes and the maths library of Metal, as C++ for OpenCL.

Metal's vectors are built into its compiler; clang's own OpenCL vectors differ from them (no element
references, other conversions), so they are classes here, with a property for every swizzle in use.
"""

from itertools import permutations, product

NAMES = "xyzw"
COLOURS = "rgba"
INTEGERS = ("char", "uchar", "short", "ushort", "int", "uint", "long", "ulong")
BITS = {"char": 8, "short": 16, "int": 32, "long": 64}

_C_UNARY = (
    "acos acosh asin asinh atan atanh ceil cos cosh exp exp2 fabs floor log log2 log10 rint round sin sinh sqrt "
    "tan tanh trunc"
)
_C_BINARY = "atan2 copysign fdim fmax fmin fmod nextafter pow"
UNARY = {
    **{name: f"__builtin_{name}f(x)" for name in _C_UNARY.split()},
    "cospi": "__builtin_cosf(x*3.14159265358979f)",
    "sinpi": "__builtin_sinf(x*3.14159265358979f)",
    "tanpi": "__builtin_tanf(x*3.14159265358979f)",
    "exp10": "__builtin_powf(10.0f,x)",
    "fract": "__builtin_fminf(x-__builtin_floorf(x),0.99999994f)",
    "rsqrt": "1.0f/__builtin_sqrtf(x)",
}
BINARY = {
    **{name: f"__builtin_{name}f(x,y)" for name in _C_BINARY.split()},
    "powr": "__builtin_powf(x,y)",
    "divide": "x/y",
}
TERNARY = {
    "fma": "__builtin_fmaf(x,y,z)",
    "fmax3": "__builtin_fmaxf(x,__builtin_fmaxf(y,z))",
    "fmin3": "__builtin_fminf(x,__builtin_fminf(y,z))",
    "fmedian3": "__builtin_fmaxf(__builtin_fminf(x,y),__builtin_fminf(__builtin_fmaxf(x,y),z))",
}
# metal::fast and metal::precise have these besides the functions above.
IN_BOTH_NAMESPACES = "max min clamp dot length normalize isnan isinf sincos saturate mix sign"


def _each(n: int, text: str) -> str:
    """`text` for every component, with $ as its name."""
    return ", ".join(text.replace("$", NAMES[i]) for i in range(n))


def _swizzles(n: int) -> list[tuple[int, ...]]:
    """The component lists that get a property: all pairs, the useful triples and quadruples."""
    every = list(product(range(n), repeat=2))
    if n == 3:
        every += product(range(3), repeat=3)
    if n == 4:
        every += (c for c in product(range(4), repeat=3) if len(set(c)) in (1, 3))
        every += permutations(range(4))
        every += [(i,) * 4 for i in range(4)] + [(0, 0, 1, 1), (2, 2, 3, 3), (0, 1, 0, 1), (2, 3, 2, 3)]
    return list(dict.fromkeys(every))


def _property(components: tuple[int, ...], name: str) -> str:
    width = len(components)
    kind = "T" if width == 1 else f"vec<T,{width}>"
    read = ",".join(NAMES[i] for i in components)
    if width > 1:
        read = f"{kind}({read})"
    text = (
        f"constexpr {kind} get_{name}() const {{ return {read}; }} "
        f"constexpr {kind} get_{name}() const __constant {{ return {read}; }} "
    )
    if len(set(components)) < width:  # a repeated component cannot be assigned to
        return text + f"__declspec(property(get=get_{name})) {kind} {name};"
    write = " ".join(f"{NAMES[c]}=a{'.' + NAMES[i] if width > 1 else ''};" for i, c in enumerate(components))
    return text + (
        f"void put_{name}({kind} a) {{ {write} }} __declspec(property(get=get_{name}, put=put_{name})) {kind} {name};"
    )


def _vector_class(n: int) -> str:
    properties = [_property(c, "".join(NAMES[i] for i in c)) for c in _swizzles(n)]
    properties += [_property((i,), COLOURS[i]) for i in range(n)]
    properties += [_property(c, "".join(COLOURS[i] for i in c)) for c in permutations(range(n), 2)]
    if n >= 3:
        properties.append(_property((0, 1, 2), "rgb"))
    body = "\n  ".join(properties)
    picks = ", ".join(f"{NAMES[i]}(bench::pick<T>({i},a,b,r...))" for i in range(n))
    return f"""\
template<typename T> struct __attribute__((aligned(sizeof(T)*{4 if n == 3 else n}))) vec<T,{n}> {{
  typedef typename bench::native<T>::type native __attribute__((ext_vector_type({n})));
  union {{ struct {{ T {",".join(NAMES[:n])}; }}; T v[{n}]; native whole; }};
  vec() = default;
  constexpr vec(const __private vec& o) : {_each(n, "$(o.$)")} {{}}
  constexpr vec(const __constant vec& o) : {_each(n, "$(o.$)")} {{}}
  vec(const vec& o) : whole(o.whole) {{}}
  vec& operator=(const vec& o) {{ whole = o.whole; return *this; }}
  template<typename S, typename = bench::enable_if_t<bench::is_scalar_v<S>>>
  constexpr vec(S s) : {_each(n, "$(T(s))")} {{}}
  template<typename U, typename = bench::enable_if_t<!bench::is_same_v<U,T>>>
  constexpr explicit vec(vec<U,{n}> o) : {_each(n, "$(T(o.$))")} {{}}
  template<typename A, typename B, typename... R, typename = bench::enable_if_t<
    bench::components<A>::n + bench::components<B>::n + (0 + ... + bench::components<R>::n) == {n}>>
  constexpr vec(A a, B b, R... r) : {picks} {{}}
  constexpr T operator[](int i) const {{ return v[i]; }}
  constexpr T operator[](int i) const __constant {{ return v[i]; }}
  __private T& operator[](int i) __private {{ return v[i]; }}
  __global T& operator[](int i) __global {{ return v[i]; }}
  __local T& operator[](int i) __local {{ return v[i]; }}
  {body}
}};"""


def _operators() -> list[str]:
    out = []
    scalar = "template<typename T, typename S, typename = bench::enable_if_t<bench::is_scalar_v<S>>>"
    for op in ("+", "-", "*", "/", "%", "&", "|", "^", "<<", ">>"):
        for n in (2, 3, 4):
            v = f"vec<T,{n}>"
            f = f"METAL_FUNC constexpr {v} operator{op}"
            out += [
                f"template<typename T> {f}({v} a, {v} b) {{ return {v}({_each(n, f'T(a.$ {op} b.$)')}); }}",
                f"{scalar} {f}({v} a, S s) {{ T b = T(s); return {v}({_each(n, f'T(a.$ {op} b)')}); }}",
                f"{scalar} {f}(S s, {v} b) {{ T a = T(s); return {v}({_each(n, f'T(a {op} b.$)')}); }}",
            ]
        out += [
            f"template<typename T, int N, typename B> METAL_FUNC {space} vec<T,N>& "
            f"operator{op}=({space} vec<T,N>& a, B b) {{ vec<T,N> t = a; t = t {op} b; a = t; return a; }}"
            for space in ("__private", "__global", "__local")
        ]
    for op in ("==", "!=", "<", ">", "<=", ">=", "&&", "||"):
        for n in (2, 3, 4):
            v, r = f"vec<T,{n}>", f"vec<bool,{n}>"
            f = f"METAL_FUNC constexpr {r} operator{op}"
            out += [
                f"template<typename T> {f}({v} a, {v} b) {{ return {r}({_each(n, f'a.$ {op} b.$')}); }}",
                f"{scalar} {f}({v} a, S s) {{ T b = T(s); return {r}({_each(n, f'a.$ {op} b')}); }}",
                f"{scalar} {f}(S s, {v} b) {{ T a = T(s); return {r}({_each(n, f'a {op} b.$')}); }}",
            ]
    for n in (2, 3, 4):
        v, r = f"vec<T,{n}>", f"vec<bool,{n}>"
        f = "template<typename T> METAL_FUNC constexpr"
        out += [
            f"{f} {v} operator-({v} a) {{ return {v}({_each(n, 'T(-a.$)')}); }}",
            f"{f} {v} operator+({v} a) {{ return a; }}",
            f"{f} {v} operator~({v} a) {{ return {v}({_each(n, 'T(~a.$)')}); }}",
            f"{f} {r} operator!({v} a) {{ return {r}({_each(n, '!a.$')}); }}",
            f"METAL_FUNC bool any({r} a) {{ return {_each(n, 'a.$').replace(',', ' ||')}; }}",
            f"METAL_FUNC bool all({r} a) {{ return {_each(n, 'a.$').replace(',', ' &&')}; }}",
        ]
    return [*out, "METAL_FUNC bool any(bool a) { return a; } METAL_FUNC bool all(bool a) { return a; }"]


def _elementwise(kind: str, n: int, name: str, arity: int) -> str:
    """The vector form of a scalar function."""
    v, args = f"vec<{kind},{n}>", "xyz"[:arity]
    calls = ", ".join(f"{name}({','.join(f'{a}.v[{i}]' for a in args)})" for i in range(n))
    return f"METAL_FUNC {v} {name}({', '.join(f'{v} {a}' for a in args)}) {{ return {v}({calls}); }}"


def _float_functions() -> list[str]:
    out = []
    for functions, arity in ((UNARY, 1), (BINARY, 2), (TERNARY, 3)):
        args = "xyz"[:arity]
        floats, halves = (", ".join(f"{kind} {a}" for a in args) for kind in ("float", "half"))
        widened = ",".join(f"float({a})" for a in args)
        for name, expression in functions.items():
            out += [
                f"METAL_FUNC float {name}({floats}) {{ return {expression}; }}",
                f"METAL_FUNC float __metal_{name}({floats}, bool = false) {{ return {name}({','.join(args)}); }}",
                f"METAL_FUNC half {name}({halves}) {{ return half({name}({widened})); }}",
            ]
            out += [_elementwise(kind, n, name, arity) for n in (2, 3, 4) for kind in ("float", "half")]
    for t in ("float", "half"):
        out += [
            f"METAL_FUNC bool isnan({t} x) {{ return x != x; }}",
            f"METAL_FUNC bool isinf({t} x) {{ return __builtin_isinf(float(x)); }}",
            f"METAL_FUNC bool isfinite({t} x) {{ return !__builtin_isinf(float(x)) && x == x; }}",
            f"METAL_FUNC bool signbit({t} x) {{ return __builtin_signbit(float(x)); }}",
            f"METAL_FUNC {t} saturate({t} x) {{ return min(max(x,{t}(0)),{t}(1)); }}",
            f"METAL_FUNC {t} sign({t} x) {{ return x>0?{t}(1):x<0?{t}(-1):{t}(0); }}",
            f"METAL_FUNC {t} mix({t} a, {t} b, {t} c) {{ return a+(b-a)*c; }}",
            f"METAL_FUNC {t} step({t} e, {t} x) {{ return x<e?{t}(0):{t}(1); }}",
            f"METAL_FUNC {t} ldexp({t} x, int k) {{ return {t}(__builtin_ldexpf(float(x),k)); }}",
            f"METAL_FUNC {t} sincos({t} x, __private {t}& c) {{ c = cos(x); return sin(x); }}",
            f"METAL_FUNC {t} modf({t} x, __private {t}& i) {{ i = trunc(x); return x-i; }}",
        ]
        for n in (2, 3, 4):
            v = f"vec<{t},{n}>"
            out += [_elementwise(t, n, name, arity) for name, arity in (("saturate", 1), ("sign", 1), ("mix", 3))]
            out += [
                f"METAL_FUNC vec<bool,{n}> isnan({v} x) {{ return x != x; }}",
                f"METAL_FUNC {t} dot({v} a, {v} b) {{ return {_each(n, 'a.$*b.$').replace(', ', '+')}; }}",
                f"METAL_FUNC {t} length({v} a) {{ return sqrt(dot(a,a)); }}",
                f"METAL_FUNC {v} normalize({v} a) {{ return a*rsqrt(dot(a,a)); }}",
            ]
    return out


def _common_functions() -> list[str]:
    """min, max, clamp, abs, select: for every number type."""
    out = []
    for t in (*INTEGERS, "float", "half"):
        larger, smaller, magnitude = "x<y?y:x", "y<x?y:x", "x<0?-x:x"
        if t in ("float", "half"):
            larger, smaller, magnitude = (f"{t}(__builtin_{f})" for f in ("fmaxf(x,y)", "fminf(x,y)", "fabsf(x)"))
        elif t.startswith("u"):
            magnitude = "x"
        out += [
            f"METAL_FUNC {t} max({t} x, {t} y) {{ return {larger}; }}",
            f"METAL_FUNC {t} min({t} x, {t} y) {{ return {smaller}; }}",
            f"METAL_FUNC {t} max3({t} x, {t} y, {t} z) {{ return max(max(x,y),z); }}",
            f"METAL_FUNC {t} min3({t} x, {t} y, {t} z) {{ return min(min(x,y),z); }}",
            f"METAL_FUNC {t} clamp({t} x, {t} lo, {t} hi) {{ return min(max(x,lo),hi); }}",
            f"METAL_FUNC {t} abs({t} x) {{ return {magnitude}; }}",
            f"METAL_FUNC {t} select({t} a, {t} b, bool c) {{ return c ? b : a; }}",
        ]
        for n in (2, 3, 4):
            v = f"vec<{t},{n}>"
            functions = (("max", 2), ("min", 2), ("clamp", 3), ("abs", 1))
            out += [_elementwise(t, n, name, arity) for name, arity in functions]
            out += [
                f"METAL_FUNC {v} clamp({v} x, {t} lo, {t} hi) {{ return min(max(x,{v}(lo)),{v}(hi)); }}",
                f"METAL_FUNC {v} select({v} a, {v} b, vec<bool,{n}> c) {{ return {v}({_each(n, 'c.$?b.$:a.$')}); }}",
            ]
    return out


def _integer_functions() -> list[str]:
    out = []
    for t in INTEGERS:
        unsigned = t if t.startswith("u") else "u" + t
        bits = BITS[unsigned[1:]]
        x = f"(ulong)({unsigned})x"  # long has 64 bits, long long 128: __builtin_clzll would count those
        out += [
            f"METAL_FUNC {t} popcount({t} x) {{ return {t}(__builtin_popcountl({x})); }}",
            f"METAL_FUNC {t} clz({t} x) {{ return x ? {t}(__builtin_clzl({x})-{64 - bits}) : {t}({bits}); }}",
            f"METAL_FUNC {t} ctz({t} x) {{ return x ? {t}(__builtin_ctzl({x})) : {t}({bits}); }}",
        ]
    for t, wide in (("int", "long"), ("uint", "ulong"), ("long", "__int128"), ("ulong", "unsigned __int128")):
        shift = 32 if t in ("int", "uint") else 64
        out.append(f"METAL_FUNC {t} mulhi({t} a, {t} b) {{ return {t}((({wide})a*b)>>{shift}); }}")
    for t in ("int", "uint"):
        out.append(f"METAL_FUNC {t} mad24({t} a, {t} b, {t} c) {{ return a*b+c; }}")
        out.append(f"METAL_FUNC {t} mul24({t} a, {t} b) {{ return a*b; }}")
    return out


def vector_header() -> str:
    """The text of generated_vectors.h, included inside namespace metal."""
    names = [*UNARY, *BINARY, *TERNARY, *IN_BOTH_NAMESPACES.split()]
    using = " ".join(f"using metal::{name};" for name in names)
    return "\n".join(
        [
            *(_vector_class(n) for n in (2, 3, 4)),
            *_operators(),
            *_common_functions(),
            *_float_functions(),
            *_integer_functions(),
            f"namespace precise {{ {using} }}",
            f"namespace fast {{ {using} }}",
            "",
        ]
    )
